"""Continuous batching: which request enters which slot when. Yields rollouts as they finish.

Decisions depend only on numbered ticks (the k-th generate call) and replicated device results, never on a clock, so
every host of a pod takes the same ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.records import Prompt, Rollout
from compass_jax.rollout.engine import DecodeState, Engine, Prefix
from compass_jax.rollout.sampling import Purpose, Sampler, sample_keys
from compass_jax.rollout.schedule import longest_first


@dataclass
class RolloutStats:
    """What one collection did; `occupancy` is live slot-steps over all slot-steps."""

    tokens: int = 0
    live_steps: int = 0  # the first token of a sample comes from the prefill: a sample of n tokens lives n - 1 steps
    calls: int = 0
    steps: int = 0
    slot_steps: int = 0
    prefills: int = 0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """The rollout's metrics by their public names."""
        return {
            "rollout/tokens_per_s": self.tokens / max(self.seconds, 1e-9),
            "rollout/slot_occupancy": (self.live_steps / self.slot_steps) if self.slot_steps else 0.0,
            "time/rollout_s": self.seconds,
        }


@dataclass
class _Open:
    """A prefix whose samples are not all in slots yet."""

    prefix: Prefix
    waiting: deque[tuple[int, int]]  # (prompt row, sample column)
    prompts: list[Prompt]
    first_request: list[int]  # store row of sample 0 of each prompt row
    most: jax.Array | None  # new tokens of each prompt row


@dataclass
class Collection:
    """One batch of requests: every prompt sampled `samples` times. Iterate to run it; `store` then holds the routing.

    Sample c of prompt n is row n * samples + c. Rows in `finished` are left out: an interrupted collection had them, and
    their routing is in the `store` that is passed in. The order in which they run changes no sample: keys belong to requests, not to slots.
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
    expected: Sequence[float] | None = None  # response tokens of each prompt's samples, NaN where unknown: the longest start first
    max_new_tokens: Sequence[int] | None = None  # of each prompt's samples, at most the configuration's

    def __iter__(self) -> Iterator[Rollout]:
        started = time.perf_counter() - self.stats.seconds  # statistics may go on from an earlier collection's
        if self.keep_routing and self.store is None:
            self.store = self.engine.new_store(len(self.prompts) * self.samples)
        slots = self.engine.config.slots
        state = self.engine.init_decode_state()
        order = range(len(self.prompts)) if self.expected is None else longest_first(self.expected)
        missing = [n for n in order if not self.finished.issuperset(range(n * self.samples, (n + 1) * self.samples))]
        queue = deque((n, self.prompts[n]) for n in missing)
        self._open: _Open | None = None
        owner: list[tuple[Prompt, int, int] | None] = [None] * slots  # (prompt, sample, store row)
        lengths = np.zeros(slots, np.int32)
        while queue or self._open or any(o is not None for o in owner):
            state = self._fill(state, queue, owner, lengths)
            state, live, lengths = self._tick(state, owner, lengths, waiting=bool(queue or self._open))
            finished = [s for s in range(slots) if owner[s] is not None and not live[s]]
            done = self._harvest(state, finished, owner, lengths)
            for slot in finished:
                owner[slot] = None
            self.stats.seconds = time.perf_counter() - started
            yield from done
        self.stats.seconds = time.perf_counter() - started

    def _fill(self, state: DecodeState, queue, owner, lengths) -> DecodeState:
        """Puts waiting samples into free slots, prefilling the next prompts when the open prefix is used up."""
        free = deque(s for s, o in enumerate(owner) if o is None)
        while free and (queue or self._open):
            if self._open is None:
                self._open = self._prefill(queue, len(free))
            opened = self._open
            slots = np.full(opened.prefix.first_token.shape, -1, np.int32)
            while free and opened.waiting:
                row, column = opened.waiting.popleft()
                slot = free.popleft()
                slots[row, column] = slot
                owner[slot] = (opened.prompts[row], column, opened.first_request[row] + column)
                lengths[slot] = len(opened.prompts[row].tokens) + 1
            state = self.engine.bulk_insert(opened.prefix, state, jnp.asarray(slots), opened.most)
            if not opened.waiting:
                self._open = None
        return state

    def _prefill(self, queue, free: int) -> _Open:
        """Prefills the next prompts of one bucket, as many as the free slots can take (in one of two batch sizes)."""
        slots, s = self.engine.config.slots, self.samples
        sizes = sorted({-(-slots // s), -(-max(1, slots // 8) // s)})
        bucket = self.engine.bucket(len(queue[0][1].tokens))
        wanted, taken, passed = min(-(-free // s), sizes[-1]), [], []
        while queue and len(taken) < wanted:
            n, prompt = queue.popleft()
            (taken if self.engine.bucket(len(prompt.tokens)) == bucket else passed).append((n, prompt))
        queue.extendleft(reversed(passed))
        rows = next(size for size in sizes if size >= len(taken))
        tokens, lengths = np.zeros((rows, bucket), np.int32), np.zeros(rows, np.int32)
        ids, visits = np.zeros(rows, np.uint32), np.zeros(rows, np.uint32)
        for r, (_, prompt) in enumerate(taken):
            tokens[r, : len(prompt.tokens)], lengths[r] = prompt.tokens, len(prompt.tokens)
            ids[r], visits[r] = prompt.id, prompt.visit
        keys = _group_keys(self.seed, self.purpose, jnp.asarray(ids), jnp.asarray(visits), s)
        prefix = self.engine.prefill_multisampling(
            params=self.params, padded_tokens=jnp.asarray(tokens), true_length=jnp.asarray(lengths), sampler=self.sampler, rng=keys, num_samples=s
        )
        self.stats.prefills += 1
        waiting = deque((r, c) for r, (n, _) in enumerate(taken) for c in range(s) if n * s + c not in self.finished)
        most = None
        if self.max_new_tokens is not None:
            most = jnp.asarray([self.max_new_tokens[n] for n, _ in taken] + [1] * (rows - len(taken)), jnp.int32)
        return _Open(prefix, waiting, [p for _, p in taken], [n * s for n, _ in taken], most)

    def _tick(self, state, owner, lengths, waiting: bool):
        """One generate call; the cache is read up to the longest live sequence, rounded up to a bucket."""
        config = self.engine.config
        longest = max((int(lengths[s]) for s, o in enumerate(owner) if o is not None), default=1)
        read = min(config.max_length, -(-(longest + config.tokens_per_call) // config.cache_bucket) * config.cache_bucket)
        wanted = max(1, config.slots // 8) if waiting else None
        state, steps = self.engine.generate(self.params, state, self.sampler, read=read, wanted_free=wanted)
        live, new_lengths, steps = jax.device_get((state.live, state.lengths, steps))
        self.stats.calls += 1
        self.stats.steps += int(steps)
        self.stats.slot_steps += int(steps) * config.slots
        return state, live, np.array(new_lengths)

    def _harvest(self, state, finished: list[int], owner, lengths) -> list[Rollout]:
        """Brings finished sequences to the host, an eighth of the slots at a time; their routing stays on the device."""
        out, size = [], max(1, self.engine.config.slots // 8)
        for at in range(0, len(finished), size):
            part = finished[at : at + size]
            pad = [0] * (size - len(part))
            rows = [owner[s][2] for s in part] + [len(self.prompts) * self.samples] * len(pad)
            arrays, self.store = self.engine.harvest(state, self.store, jnp.asarray(part + pad, jnp.int32), jnp.asarray(rows, jnp.int32))
            tokens, logp, entropy = jax.device_get(arrays)
            for i, slot in enumerate(part):
                prompt, column, row = owner[slot]
                n = int(lengths[slot])
                truncated = int(tokens[i, n - 1]) != self.engine.eos_id
                self.stats.tokens += n - len(prompt.tokens)
                self.stats.live_steps += n - len(prompt.tokens) - 1
                out.append(Rollout(prompt, column, tokens[i, :n], logp[i, :n], entropy[i, :n], truncated, self.policy_version, row))
        return out


def _group_keys(seed: int, purpose: Purpose, ids, visits, samples: int):
    """Keys `[p s 2]` of all samples of `p` prompts."""
    p = ids.shape[0]
    spread = [jnp.repeat(x, samples, total_repeat_length=p * samples) for x in (ids, visits)]
    column = jnp.tile(jnp.arange(samples, dtype=jnp.uint32), p)
    return _jitted_keys(seed, purpose, *spread, column).reshape(p, samples, 2)


_jitted_keys = jax.jit(sample_keys, static_argnums=(0, 1))
