"""Batches of samples for training, evaluation and the filter."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from jaxtyping import Array, UInt

from compass_jax.base.aliases import Tree
from compass_jax.base.records import EPISODE, Prompt, Rollout, SampleKey
from compass_jax.config import ConfigError
from compass_jax.rollout.engine_api import RolloutEngine
from compass_jax.rollout.request import Request
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.rollout.schedule import longest_first
from compass_jax.rollout.stats import RolloutStats


@dataclass
class Collection:
    """One batch of requests: every prompt is sampled `samples` times. Iterating runs it and yields
    the rollouts as they finish; `routes` then has their routes.

    The routes of sample c of prompt n go to row rows[n] + c of `buffer` (None: to row n * samples +
    c of a new one). `sample_keys` restricts the samples (None: all). The order of the samples does
    not change them, because keys belong to samples and not to slots.

    After each tick `admit` gets the samples that finished in it, which were yielded before, and
    returns further ones, of these prompts, which start while the others decode. A sample can be
    asked for once.

    The collection ends after the tick at which `enough` returns true. `abort` then returns the
    unfinished samples. They can be `carried` into a later collection, with the buffer of their
    routes. There they continue under that collection's policy, and their earlier tokens keep their
    log-probs and versions.
    """

    engine: RolloutEngine
    params: Tree
    prompts: Sequence[Prompt]
    samples: int
    purpose: Purpose
    seed: int
    policy_version: int = 0
    sampler: Sampler | None = None
    temperature: float | None = None  # instead of the sampler's, without another compilation
    keep_routes: bool = True
    stats: RolloutStats = field(default_factory=RolloutStats)
    buffer: RouteBuffer | None = None
    rows: Sequence[int] | None = None
    sample_keys: frozenset[SampleKey] | None = None
    carried: Sequence[Rollout] = ()  # unfinished samples of an earlier collection
    enough: Callable[[], bool] | None = None
    admit: Callable[[Sequence[Rollout]], Iterable[SampleKey]] | None = None
    # response tokens of each prompt's samples, NaN where unknown: the longest start first
    expected: Sequence[float] | None = None
    # limits of each prompt's samples, at most the configuration's
    max_new_tokens: Sequence[int] | None = None
    streams: bool = False  # as in Batcher

    def __iter__(self) -> Iterator[Rollout]:
        # the counters may be those of an earlier collection
        started = time.perf_counter() - self.stats.seconds
        self._held = self._new_buffer() if self.buffer is None else self.buffer
        self.batcher = self.engine.batcher(
            self.params,
            self.purpose,
            self.seed,
            sampler=self.sampler if self.temperature is None else Sampler(per_request=True),
            version=self.policy_version,
            routes=self._held,
            stats=self.stats,
            **({"streams": True} if self.streams else {}),  # samplers' batchers do not stream
        )
        self._asked: set[SampleKey] = set()
        self._add_carried()
        self._known = {x.sample(column) for x in self.prompts for column in range(self.samples)}
        self._add_new(self._known if self.sample_keys is None else self.sample_keys)
        while self.busy and not (self.enough is not None and self.enough()):
            done = self._step()
            self.stats.seconds = time.perf_counter() - started
            yield from done
            if self.admit is not None:
                self._admit(self.admit(done))
        self.stats.seconds = time.perf_counter() - started

    @property
    def busy(self) -> bool:
        """Whether any sample is unfinished."""
        return self.batcher.busy

    def abort(self) -> list[Rollout]:
        """Returns the unfinished samples, each with at least one token and its routes in
        its row.
        """
        return [x.rollout(self.engine.end_ids) for x in self.batcher.abort()]

    @property
    def routes(self) -> UInt[Array, "rows t l k"] | None:
        """The routes of finished and aborted samples by row; None if routes are not kept."""
        return self._held.rows

    def _step(self) -> list[Rollout]:
        """Runs one tick and returns the finished rollouts."""
        return [x.rollout(self.engine.end_ids) for x in self.batcher.step()]

    def _new_buffer(self) -> RouteBuffer:
        buffer = self.engine.route_buffer(len(self.prompts), self.samples, self.keep_routes)
        for _ in self.prompts:
            buffer.allocate()
        return buffer

    def _add_carried(self) -> None:
        """Adds the carried samples in order of length, so that they share prefills."""
        place = {prompt.key: n for n, prompt in enumerate(self.prompts)}
        carried = sorted(
            ((place[x.prompt.key], x) for x in self.carried),
            key=lambda row: (-len(row[1].tokens), row[0], row[1].sample),
        )
        self.batcher.add([Request.resumed(rollout, self._limit(n)) for n, rollout in carried])
        self._asked |= {rollout.key for rollout in self.carried}

    def _admit(self, keys: Iterable[SampleKey]) -> None:
        keys = set(keys)
        if not keys:
            return
        if wrong := (keys - self._known) | (keys & self._asked):
            raise ValueError(
                f"Collection.admit returned {min(wrong)}, which is not a sample of these prompts,"
                " or was asked for before"
            )
        self._add_new(keys)

    def _add_new(self, new_keys: Container[SampleKey]) -> None:
        """Adds new samples; those of a prompt share a prefill."""
        order = range(len(self.prompts)) if self.expected is None else longest_first(self.expected)
        for n in order:
            keys = [self.prompts[n].sample(column) for column in range(self.samples)]
            keys = [key for key in keys if key in new_keys and key not in self._asked]
            self._asked.update(keys)
            self._start(n, keys)

    def _start(self, n: int, keys: Sequence[SampleKey]) -> None:
        """Starts new samples of prompt n."""
        prompt, first, limit = self.prompts[n], self._first(n), self._limit(n)
        if prompt.turns == EPISODE:
            raise ConfigError(
                f"{prompt.label}: it has episodes, which compass train, eval and try alone play"
            )
        requests = [
            Request.of(
                prompt,
                key.index,
                first + key.index,
                limit,
                self.policy_version,
                temperature=self.temperature or 0.0,
            )
            for key in keys
        ]
        self.batcher.add(requests, range(self.samples))

    def _first(self, n: int) -> int:
        """Returns the row of the first sample of prompt n."""
        return n * self.samples if self.rows is None else self.rows[n]

    def _limit(self, n: int) -> int:
        """Returns the maximum length of prompt n's samples in tokens, prompt included."""
        most = self.engine.config.max_new_tokens
        if self.max_new_tokens is not None:
            most = min(max(1, self.max_new_tokens[n]), most)
        return len(self.prompts[n].tokens) + most
