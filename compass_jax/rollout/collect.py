"""Continuous batching: which request enters which slot when. Yields rollouts as they finish.

Decisions depend only on numbered ticks (the k-th generate call) and replicated device results,
never on a clock, so every host of a pod takes the same ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.records import Prompt, Rollout
from compass_jax.rollout.engine import DecodeState, Engine, Prefix
from compass_jax.rollout.pages import PagePool
from compass_jax.rollout.sampling import Purpose, Sampler, sample_keys
from compass_jax.rollout.schedule import evenly, longest_first
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


@dataclass(eq=False)
class Sample:
    """One sample on its way, in a slot or waiting for one. What it has so far is its own: a
    preempted or carried sample goes on where it stopped.

    Its log-probs and entropies so far are on the host, its routes in its row of the store; a
    prefill over its tokens, replaying these routes (live ones without a store), brings back the
    cache, and draws the next token with the key that the decoding step would have used.
    """

    prompt: Prompt
    column: int
    row: int  # of the store
    limit: int  # tokens, prompt included, at which it is cut
    tokens: np.ndarray  # int32 [t], prompt included
    logp: np.ndarray  # float32 [t]
    entropy: np.ndarray  # float32 [t]
    versions: np.ndarray  # int32 [t]
    length: int = 0  # tokens by now, those in the slot included
    slot: int = -1


@dataclass
class _Open:
    """A prefix whose samples are not all in slots yet."""

    prefix: Prefix
    waiting: deque[tuple[int, Sample]]  # (prompt row, sample)
    # by prompt row and group of slots: whose pages of the prompt others share
    leader: dict[tuple[int, int], Sample] = field(default_factory=dict)


@dataclass
class Collection:
    """One batch of requests: every prompt sampled `samples` times. Iterate to run it; `store` then
    holds the routing.

    Sample c of prompt n is row n * samples + c. Rows in `finished` are left out: an interrupted
    collection had them, and their routing is in the `store` that is passed in. The order in which
    they run changes no sample: keys belong to requests, not to slots. With `rollout.cache_pages` a
    sample enters a slot when pages are free for it; when they run out, the youngest gives way and
    goes on later.

    Where `enough` says so after a tick, the collection ends; `cut` then gives what is not finished.
    Such samples are `carried` into a later collection, with the store that has their routes: they
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
    store: jax.Array | None = None
    finished: frozenset[int] = frozenset()
    # by row: begun in an earlier collection
    carried: Mapping[int, Rollout] = field(default_factory=dict)
    enough: Callable[[], bool] | None = None
    # response tokens of each prompt's samples, NaN where unknown: the longest start first
    expected: Sequence[float] | None = None
    # of each prompt's samples, at most the configuration's
    max_new_tokens: Sequence[int] | None = None

    def __iter__(self) -> Iterator[Rollout]:
        # statistics may go on from an earlier collection's
        started = time.perf_counter() - self.stats.seconds
        config = self.engine.config
        if self.keep_routing and self.store is None:
            self.store = self.engine.new_store(len(self.prompts) * self.samples)
        self._state = state = self.engine.init_decode_state()
        order = range(len(self.prompts)) if self.expected is None else longest_first(self.expected)
        self._begun = self.finished | self.carried.keys()
        self._queue = deque(
            n
            for n in order
            if not self._begun.issuperset(range(n * self.samples, (n + 1) * self.samples))
        )
        self._open: _Open | None = None
        # in length together, for their prefills
        alike = sorted(
            map(self._carry, self.carried.values()), key=lambda x: (-len(x.tokens), x.row)
        )
        self._interrupted = deque(alike)
        self._slots: list[Sample | None] = [None] * config.slots
        self._entered: list[Sample] = []  # those in slots, the oldest first
        groups, room = (
            self.engine.slot_groups,
            (config.page_tokens, config.slots, config.pages_per_slot),
        )
        self._pages = PagePool(config.cache_pages, *room, groups) if config.cache_pages else None
        while self._waiting or self._entered:
            if self.enough is not None and self.enough():
                break
            state = self._fill(self._make_room(state))
            state, live = self._tick(state)
            self._state = state
            done = self._harvest(state, [x for x in self._entered if not live[x.slot]])
            self.stats.seconds = time.perf_counter() - started
            yield from done
        self.stats.seconds = time.perf_counter() - started

    def cut(self) -> dict[int, Rollout]:
        """After the last rollout: the samples that are not finished, by row, each with at least one
        token; their routes are in the store.
        """
        self._fetch(self._state, [(sample.slot, sample) for sample in self._entered])
        return {
            sample.row: self._rollout(sample) for sample in (*self._entered, *self._interrupted)
        }

    @property
    def _waiting(self) -> bool:
        """Whether a sample waits for a slot."""
        return bool(self._queue or self._open or self._interrupted)

    # ---- who has which slot ----------------------------------------------------------------------

    def _next_call(self, sample: Sample, length: int) -> int:
        """Positions that are written by the end of the next call: every token but the last has been
        an input by then.
        """
        return min(length + self.engine.config.tokens_per_call, sample.limit) - 1

    def _make_room(self, state: DecodeState) -> DecodeState:
        """Every sample in a slot gets the pages of its next call, the oldest first; where none are
        left, the youngest of its group gives way.
        """
        if self._pages is None:
            return state
        victims: list[tuple[int, Sample]] = []
        for sample in list(self._entered):
            while sample.slot >= 0 and not self._pages.grow(
                sample.slot, self._next_call(sample, sample.length)
            ):
                group = self._pages.group(sample.slot)
                youngest = next(
                    x for x in reversed(self._entered) if self._pages.group(x.slot) == group
                )
                victims.append((youngest.slot, youngest))
                self._leave(youngest)
        self._fetch(state, victims)
        for slot, sample in victims:
            # victims come from the youngest on, so the oldest goes on first
            self._interrupted.appendleft(sample)
            state = self.engine.free_resource(jnp.int32(slot), state)
        self.stats.preempted += len(victims)
        return state

    def _enter(
        self, sample: Sample, free: deque[int], opened: _Open | None = None, row: int = 0
    ) -> bool:
        """Gives a sample one of the `free` slots and the pages of its next call. False where too
        few are free for it; slots of groups without pages are then no longer in `free`.

        opened, row: the prefix and prompt row that it comes from, unless it had begun. One that has
        waits until every sample of the slots' group could have a page more: it would be the first
        to give way again.
        """
        length = len(sample.tokens) + 1
        while free:
            slot = free[0]
            leader = None if opened is None else opened.leader.get((row, self._group(slot)))
            if self._admit(sample, slot, length, leader):
                break
            for other in [x for x in free if self._group(x) == self._group(slot)]:
                free.remove(other)
        else:
            return False
        sample.slot, sample.length, self._slots[slot] = free.popleft(), length, sample
        self._entered.append(sample)
        if opened is not None:
            opened.leader[row, self._group(slot)] = sample
        return True

    def _group(self, slot: int) -> int:
        return 0 if self._pages is None else self._pages.group(slot)

    def _admit(self, sample: Sample, slot: int, length: int, leader: Sample | None) -> bool:
        """Whether pages were free, and are the slot's now."""
        if self._pages is None:
            return True
        # The leader may have left its slot, and come back in another group.
        sharing = (
            leader is not None
            and leader.slot >= 0
            and self._group(leader.slot) == self._group(slot)
        )
        shared = (leader.slot, len(sample.prompt.tokens)) if sharing else (None, 0)
        begun = len(sample.tokens) > len(sample.prompt.tokens)
        spare = sum(self._group(x.slot) == self._group(slot) for x in self._entered) if begun else 0
        return self._pages.admit(slot, self._next_call(sample, length), *shared, spare)

    def _leave(self, sample: Sample) -> None:
        if self._pages is not None:
            self._pages.release(sample.slot)
        self._slots[sample.slot] = None
        self._entered.remove(sample)
        sample.slot = -1

    # ---- into slots ------------------------------------------------------------------------------

    def _fill(self, state: DecodeState) -> DecodeState:
        """Puts waiting samples into free slots: first those that have begun, then new ones,
        prefilling when the open prefix is used up.
        """
        empty = [slot for slot, sample in enumerate(self._slots) if sample is None]
        free = deque(evenly(empty, len(self._slots), self.engine.slot_groups))
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
        self, state: DecodeState, opened: _Open, free: deque[int]
    ) -> tuple[DecodeState, int]:
        """(state, number of samples of `opened` that entered a slot)."""
        slots, most, entered = (
            np.full(opened.prefix.first_token.shape, -1, np.int32),
            np.ones(len(opened.prefix.lengths), np.int32),
            0,
        )
        while free and opened.waiting:
            row, sample = opened.waiting[0]
            if not self._enter(sample, free, opened, row):
                break
            opened.waiting.popleft()
            slots[row, sample.column], most[row] = sample.slot, sample.limit - len(sample.tokens)
            entered += 1
        if entered:
            state = self.engine.bulk_insert(
                opened.prefix, self._with_table(state), jnp.asarray(slots), jnp.asarray(most)
            )
        return state, entered

    def _prefill(self, free: int) -> _Open:
        """Prefills the next prompts of one bucket, as many as the free slots can take (in one of
        two batch sizes).
        """
        config, s = self.engine.config, self.samples
        sizes = sorted({-(-config.slots // s), -(-max(1, config.slots // 8) // s)})
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
        waiting = (
            (r, self._sample(n, c))
            for r, n in enumerate(taken)
            for c in range(s)
            if n * s + c not in self._begun
        )
        return _Open(prefix, deque(waiting))

    def _limit(self, n: int) -> int:
        most = self.engine.config.max_new_tokens
        if self.max_new_tokens is not None:
            most = min(max(1, self.max_new_tokens[n]), most)
        return len(self.prompts[n].tokens) + most

    def _sample(self, n: int, column: int) -> Sample:
        prompt = self.prompts[n]
        empty, versions = (
            np.zeros(len(prompt.tokens), np.float32),
            np.full(len(prompt.tokens), self.policy_version, np.int32),
        )
        return Sample(
            prompt,
            column,
            n * self.samples + column,
            self._limit(n),
            prompt.tokens,
            empty,
            empty,
            versions,
        )

    def _carry(self, was: Rollout) -> Sample:
        limit = self._limit(was.row // self.samples)
        return Sample(
            was.prompt,
            was.sample,
            was.row,
            limit,
            was.tokens,
            was.logp,
            was.entropy,
            was.versions,
            len(was.tokens),
        )

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
            if not fits or not self._enter(sample, free):
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
            None if self.store is None else self.engine.stored_routes(self.store, rows, bucket)
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
            if self._pages is None
            else state._replace(table=jnp.asarray(self._pages.table.copy()))
        )

    def _tick(self, state: DecodeState) -> tuple[DecodeState, np.ndarray]:
        """One generate call; the cache is read up to the longest live sequence, rounded up to a
        bucket.
        """
        config = self.engine.config
        longest = max((sample.length for sample in self._entered), default=1)
        read = min(
            config.max_length,
            -(-(longest + config.tokens_per_call) // config.cache_bucket) * config.cache_bucket,
        )
        # for want of pages: what waits needs more than these
        empty = config.slots - len(self._entered)
        wanted = empty + max(1, config.slots // 8) if self._waiting else None
        state, steps = self.engine.generate(
            self.params, self._with_table(state), self.sampler, read=read, wanted_free=wanted
        )
        live, lengths, steps = fetch((state.live, state.lengths, steps))
        for sample in self._entered:
            self.stats.live_steps += int(lengths[sample.slot]) - sample.length
            sample.length = int(lengths[sample.slot])
        self.stats.calls += 1
        self.stats.steps += int(steps)
        self.stats.slot_steps += int(steps) * config.slots
        return state, live

    def _fetch(self, state: DecodeState, samples: Sequence[tuple[int, Sample]]) -> None:
        """Brings what the (slot, sample) have to the host, an eighth of the slots at a time; their
        routing stays on the device, in the store.
        """
        size = max(1, self.engine.config.slots // 8)
        for at in range(0, len(samples), size):
            part = samples[at : at + size]
            pad = [0] * (size - len(part))
            slots = [slot for slot, _ in part] + pad
            rows = [sample.row for _, sample in part] + [self._nowhere] * len(pad)
            arrays, self.store = self.engine.harvest(
                state, self.store, jnp.asarray(slots, jnp.int32), jnp.asarray(rows, jnp.int32)
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

    def _harvest(self, state: DecodeState, done: list[Sample]) -> list[Rollout]:
        """The rollouts of samples that have ended; their slots are free."""
        self._fetch(state, [(sample.slot, sample) for sample in done])
        out = []
        for x in done:
            self._leave(x)
            out.append(self._rollout(x))
        return out

    def _rollout(self, x: Sample) -> Rollout:
        truncated = int(x.tokens[-1]) != self.engine.eos_id
        return Rollout(
            x.prompt, x.column, x.tokens, x.logp, x.entropy, truncated, x.versions, x.row
        )

    @property
    def _nowhere(self) -> int:
        """A row past the store's end."""
        return len(self.prompts) * self.samples if self.store is None else self.store.shape[0]


_jitted_keys = jax.jit(sample_keys, static_argnums=(0, 1))
