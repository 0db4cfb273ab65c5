"""Continuous batching: which request enters which slot when. Yields rollouts as they finish.

Decisions depend only on numbered ticks (the k-th generate call) and replicated device results,
never on a clock, so every host of a pod takes the same ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.records import Prompt, Rollout, SampleKey
from compass_jax.rollout.engine import DecodeState, Engine, Prefix
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose, Sampler, sample_keys
from compass_jax.rollout.schedule import longest_first
from compass_jax.rollout.sizes import prefill_rows
from compass_jax.rollout.slots import OpenPrefix, Request, Slots
from compass_jax.sharding import fetch


@dataclass
class RolloutStats:
    """What one collection did; `occupancy` is live slot-steps over all slot-steps."""

    tokens: int = 0
    # the first token of a sample comes from a prefill: a sample of n tokens that was not preempted
    # lives n - 1 steps
    live_steps: int = 0
    calls: int = 0
    steps: int = 0
    slot_steps: int = 0
    prefills: int = 0
    preempted: int = 0  # times that a sample gave its slot up for want of pages
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """The rollout's metrics by their public names."""
        return {
            "rollout/tokens_per_s": self.tokens / max(self.seconds, 1e-9),
            "rollout/slot_occupancy": (self.live_steps / self.slot_steps)
            if self.slot_steps
            else 0.0,
            "rollout/preempted": float(self.preempted),
            "time/rollout_s": self.seconds,
        }


@dataclass
class Collection:
    """One batch of requests: every prompt sampled `samples` times. Iterate to run it; `routes` then
    holds the routes.

    The routes of sample c of prompt n go to row rows[n] + c of `buffer` (None: to row n * samples +
    c of one of its own). Of the samples those in `asked` run (None: all). The order in which they
    run changes none of them: keys belong to samples, not to slots. With `rollout.cache_pages` a
    sample enters a slot when pages are free for it; when they run out, the youngest gives way and
    goes on later.

    Where `enough` says so after a tick, the collection ends; `cut` then gives what is not finished.
    Such samples are `carried` into a later collection, with the buffer that has their routes: they
    go on under its policy, and their tokens keep log-probs and versions.
    """

    engine: Engine
    params: object
    prompts: Sequence[Prompt]
    samples: int
    purpose: Purpose
    seed: int
    policy_version: int = 0
    sampler: Sampler | None = None
    keep_routing: bool = True
    stats: RolloutStats = field(default_factory=RolloutStats)
    buffer: RouteBuffer | None = None
    rows: Sequence[int] | None = None
    asked: frozenset[SampleKey] | None = None
    carried: Sequence[Rollout] = ()  # begun in an earlier collection
    enough: Callable[[], bool] | None = None
    # response tokens of each prompt's samples, NaN where unknown: the longest start first
    expected: Sequence[float] | None = None
    # of each prompt's samples, at most the configuration's
    max_new_tokens: Sequence[int] | None = None

    def __iter__(self) -> Iterator[Rollout]:
        # statistics may go on from an earlier collection's
        started = time.perf_counter() - self.stats.seconds
        self._held = self._new_buffer() if self.buffer is None else self.buffer
        own = range(0, len(self.prompts) * self.samples, self.samples)
        self._first = own if self.rows is None else self.rows
        self._begun = {rollout.key for rollout in self.carried}
        self._state = state = self.engine.init_decode_state()
        order = range(len(self.prompts)) if self.expected is None else longest_first(self.expected)
        self._queue = deque(n for n in order if self._columns(n))
        self._open: OpenPrefix | None = None
        self._interrupted = self._alike()
        self._slots = Slots(self.engine.config, self.engine.slot_groups)
        while self._waiting or self._slots.entered:
            if self.enough is not None and self.enough():
                break
            state = self._fill(self._make_room(state))
            state, live = self._tick(state)
            self._state = state
            done = self._harvest(state, [x for x in self._slots.entered if not live[x.slot]])
            self.stats.seconds = time.perf_counter() - started
            yield from done
        self.stats.seconds = time.perf_counter() - started

    def cut(self) -> list[Rollout]:
        """After the last rollout: the samples that are not finished, each with at least one token;
        their routes are in their rows.
        """
        entered = self._slots.entered
        self._fetch(self._state, [(request.slot, request) for request in entered])
        return [x.rollout(self.engine.eos_id) for x in (*entered, *self._interrupted)]

    @property
    def routes(self) -> jax.Array | None:
        """The routes of what has ended or was cut, by row; None where none are kept."""
        return self._held.rows

    def _new_buffer(self) -> RouteBuffer:
        new = self.engine.new_store if self.keep_routing else lambda rows: None
        buffer = RouteBuffer(new, len(self.prompts), self.samples)
        for _ in self.prompts:
            buffer.allocate()
        return buffer

    def _columns(self, n: int) -> list[int]:
        """The samples of prompt n that are to be begun."""
        keys = [self.prompts[n].sample(column) for column in range(self.samples)]
        asked = keys if self.asked is None else self.asked.intersection(keys)
        return [key.index for key in keys if key in asked and key not in self._begun]

    def _alike(self) -> deque[Request]:
        """The carried samples, in length together, for their prefills."""
        place = {prompt.key: n for n, prompt in enumerate(self.prompts)}
        carried = sorted(
            ((place[x.prompt.key], x) for x in self.carried),
            key=lambda found: (-len(found[1].tokens), found[0], found[1].sample),
        )
        return deque(Request.again(rollout, self._limit(n)) for n, rollout in carried)

    @property
    def _waiting(self) -> bool:
        """Whether a sample waits for a slot."""
        return bool(self._queue or self._open or self._interrupted)

    def _make_room(self, state: DecodeState) -> DecodeState:
        """Every request in a slot has the pages of its next call; those that gave way wait."""
        victims = self._slots.preempt()
        self._fetch(state, victims)
        for slot, request in victims:
            # victims come from the youngest on, so the oldest goes on first
            self._interrupted.appendleft(request)
            state = self.engine.free_resource(jnp.int32(slot), state)
        self.stats.preempted += len(victims)
        return state

    # ---- into slots ------------------------------------------------------------------------------

    def _fill(self, state: DecodeState) -> DecodeState:
        """Puts waiting samples into free slots: first those that have begun, then new ones,
        prefilling when the open prefix is used up.
        """
        free = self._slots.free()
        while free and self._interrupted:
            state, entered = self._resume(state, free)
            if not entered:
                return state
        while free and (self._queue or self._open):
            if self._open is None:
                self._open = self._prefill(len(free))
            state, entered = self._insert(state, self._open, free)
            if not self._open.waiting:
                self._open = None
            if not entered:
                break
        return state

    def _insert(
        self, state: DecodeState, opened: OpenPrefix, free: deque[int]
    ) -> tuple[DecodeState, int]:
        """(state, number of samples of `opened` that entered a slot)."""
        slots, most, entered = (
            np.full(opened.prefix.first_token.shape, -1, np.int32),
            np.ones(len(opened.prefix.lengths), np.int32),
            0,
        )
        while free and opened.waiting:
            row, sample = opened.waiting[0]
            if not self._slots.enter(sample, free, opened, row):
                break
            opened.waiting.popleft()
            slots[row, sample.column], most[row] = sample.slot, sample.limit - len(sample.tokens)
            entered += 1
        if entered:
            state = self.engine.bulk_insert(
                opened.prefix, self._with_table(state), jnp.asarray(slots), jnp.asarray(most)
            )
        return state, entered

    def _prefill(self, free: int) -> OpenPrefix:
        """Prefills the next prompts of one bucket, as many as the free slots can take (in one of
        two batch sizes).
        """
        config, s = self.engine.config, self.samples
        sizes = prefill_rows(config, s)
        bucket = self.engine.bucket(len(self.prompts[self._queue[0]].tokens))
        wanted, taken, passed = min(-(-free // s), sizes[-1]), [], []
        while self._queue and len(taken) < wanted:
            n = self._queue.popleft()
            (taken if self.engine.bucket(len(self.prompts[n].tokens)) == bucket else passed).append(
                n
            )
        self._queue.extendleft(reversed(passed))
        rows = next(size for size in sizes if size >= len(taken))
        prompts = [self.prompts[n] for n in taken]
        prefix = self._run_prefill(
            [prompt.tokens for prompt in prompts],
            prompts,
            [range(s)] * len(taken),
            (rows, bucket),
            None,
        )
        waiting = deque(
            (
                r,
                Request.of(
                    self.prompts[n], c, self._first[n] + c, self._limit(n), self.policy_version
                ),
            )
            for r, n in enumerate(taken)
            for c in self._columns(n)
        )
        return OpenPrefix(prefix, waiting)

    def _limit(self, n: int) -> int:
        most = self.engine.config.max_new_tokens
        if self.max_new_tokens is not None:
            most = min(max(1, self.max_new_tokens[n]), most)
        return len(self.prompts[n].tokens) + most

    def _resume(self, state: DecodeState, free: deque[int]) -> tuple[DecodeState, int]:
        """Prefills samples that have begun, of one length bucket, and puts them into slots; (state,
        how many).
        """
        size, entered = max(1, self.engine.config.slots // 8), []
        bucket = self.engine.resume_bucket(len(self._interrupted[0].tokens))
        for sample in list(self._interrupted):
            fits = (
                len(entered) < size
                and free
                and self.engine.resume_bucket(len(sample.tokens)) == bucket
            )
            if not fits or not self._slots.enter(sample, free):
                break
            self._interrupted.popleft()
            entered.append(sample)
        if not entered:
            return state, 0
        size = 1 if len(entered) == 1 else size
        rows = jnp.asarray(
            [x.row for x in entered] + [self._nowhere] * (size - len(entered)), jnp.int32
        )
        routing = (
            None if self.routes is None else self.engine.stored_routes(self.routes, rows, bucket)
        )
        prefix = self._run_prefill(
            [x.tokens for x in entered],
            [x.prompt for x in entered],
            [[x.column] for x in entered],
            (size, bucket),
            routing,
        )
        slots, most = np.full((size, 1), -1, np.int32), np.ones(size, np.int32)
        for i, sample in enumerate(entered):
            slots[i, 0], most[i] = sample.slot, sample.limit - len(sample.tokens)
        return self.engine.bulk_insert(
            prefix, self._with_table(state), jnp.asarray(slots), jnp.asarray(most)
        ), len(entered)

    def _run_prefill(self, texts, prompts, columns, shape: tuple[int, int], routing) -> Prefix:
        """Runs `texts` of `prompts`, padded to `shape`, for the samples `columns` of each."""
        s = len(columns[0])
        tokens, lengths = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
        ids, visits, each = (
            np.zeros(shape[0], np.uint32),
            np.zeros(shape[0], np.uint32),
            np.zeros((shape[0], s), np.uint32),
        )
        for r, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
            tokens[r, : len(text)], lengths[r] = text, len(text)
            ids[r], visits[r], each[r] = prompt.id, prompt.visit, columns[r]
        keys = _jitted_keys(
            self.seed,
            self.purpose,
            jnp.asarray(np.repeat(ids, s)),
            jnp.asarray(np.repeat(visits, s)),
            jnp.asarray(each.reshape(-1)),
        )
        self.stats.prefills += 1
        return self.engine.prefill_multisampling(
            params=self.params,
            padded_tokens=jnp.asarray(tokens),
            true_length=jnp.asarray(lengths),
            sampler=self.sampler,
            rng=keys.reshape(shape[0], s, 2),
            num_samples=s,
            routing=routing,
        )

    # ---- decoding and out of slots ---------------------------------------------------------------

    def _with_table(self, state: DecodeState) -> DecodeState:
        return (
            state
            if self._slots.pages is None
            else state._replace(table=jnp.asarray(self._slots.pages.table.copy()))
        )

    def _tick(self, state: DecodeState) -> tuple[DecodeState, np.ndarray]:
        """One generate call; the cache is read up to the longest live sequence, rounded up to a
        bucket.
        """
        config = self.engine.config
        longest = max((sample.length for sample in self._slots.entered), default=1)
        read = min(
            config.max_length,
            -(-(longest + config.tokens_per_call) // config.cache_bucket) * config.cache_bucket,
        )
        # for want of pages: what waits needs more than these
        empty = config.slots - len(self._slots.entered)
        wanted = empty + max(1, config.slots // 8) if self._waiting else None
        state, steps = self.engine.generate(
            self.params, self._with_table(state), self.sampler, read=read, wanted_free=wanted
        )
        live, lengths, steps = fetch((state.live, state.lengths, steps))
        for sample in self._slots.entered:
            self.stats.live_steps += int(lengths[sample.slot]) - sample.length
            sample.length = int(lengths[sample.slot])
        self.stats.calls += 1
        self.stats.steps += int(steps)
        self.stats.slot_steps += int(steps) * config.slots
        return state, live

    def _fetch(self, state: DecodeState, samples: Sequence[tuple[int, Request]]) -> None:
        """Brings what the (slot, sample) have to the host, an eighth of the slots at a time; their
        routes stay on the device.
        """
        size = max(1, self.engine.config.slots // 8)
        for at in range(0, len(samples), size):
            part = samples[at : at + size]
            pad = [0] * (size - len(part))
            slots = [slot for slot, _ in part] + pad
            rows = [sample.row for _, sample in part] + [self._nowhere] * len(pad)
            arrays, self._held.rows = self.engine.harvest(
                state, self._held.rows, jnp.asarray(slots, jnp.int32), jnp.asarray(rows, jnp.int32)
            )
            tokens, logp, entropy = fetch(arrays)
            for i, (_, sample) in enumerate(part):
                before, n = len(sample.tokens), sample.length
                sample.tokens = tokens[i, :n]
                sample.logp = np.concatenate([sample.logp, logp[i, before:n]])
                sample.entropy = np.concatenate([sample.entropy, entropy[i, before:n]])
                sample.versions = np.concatenate(
                    [sample.versions, np.full(n - before, self.policy_version, np.int32)]
                )
                self.stats.tokens += n - before

    def _harvest(self, state: DecodeState, done: list[Request]) -> list[Rollout]:
        """The rollouts of samples that have ended; their slots are free."""
        self._fetch(state, [(sample.slot, sample) for sample in done])
        out = []
        for x in done:
            self._slots.leave(x)
            out.append(x.rollout(self.engine.eos_id))
        return out

    @property
    def _nowhere(self) -> int:
        """A row that there is not."""
        return len(self._held)


_jitted_keys = jax.jit(sample_keys, static_argnums=(0, 1))
