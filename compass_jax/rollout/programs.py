"""The programs that the engine runs for each of its workloads, such as training's rollouts and
evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from compass_jax.base.programs import Program, Result, struct
from compass_jax.rollout.draft_engine import DraftEngine
from compass_jax.rollout.drafts import DraftRows
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.prefill import Extension
from compass_jax.rollout.sampling import Sampler
from compass_jax.rollout.sizes import (
    extension_sizes,
    prefill_rows,
    reads,
    resume_buckets,
    resume_rows,
    share,
)
from compass_jax.rollout.state import DecodeState


@dataclass(frozen=True)
class EngineWorkload:
    """A workload of the engine.

    Args:
        name: suffix of its programs' names; empty for training's.
        samples: number of samples of each prompt.
        samplers: the samplers that it uses.
        rows: rows of the buffer that keeps the routes; 0: routes are not kept.
        rows_together: number of rows of the buffer that are read together at the end.
        goes_on: whether samples are interrupted and resumed, in another slot or another step.
    """

    name: str
    samples: int
    samplers: tuple[Sampler, ...]
    rows: int = 0
    rows_together: int = 0
    goes_on: bool = False


def sampling_programs(
    engine: Engine, params: Program, uses: tuple[EngineWorkload, ...]
) -> Iterator[Program]:
    """Yields the programs that the engine runs for `uses`, given the program that makes the
    parameters.
    """
    slots = Program("slots", Engine.init_decode_state, (engine,))
    yield slots
    for use in uses:
        yield from _Lister(engine, Result(params), Result(slots), use).programs()


@dataclass(frozen=True)
class _Lister:
    engine: Engine
    params: Result
    state: Result
    use: EngineWorkload

    def programs(self) -> Iterator[Program]:
        config, use = self.engine.config, self.use
        buffer = None
        if use.rows and self.engine.model_config.moe_layers:
            buffer = self._named("store", Engine.new_routes, use.rows)
            yield buffer
        for sampler in use.samplers:
            for bucket in config.prompt_buckets:
                for rows in prefill_rows(config, use.samples, bucket):
                    prefill = self._prefill("prefill", (rows, bucket), use.samples, sampler, None)
                    yield prefill
                    yield self._insert("insert", prefill, (rows, use.samples))
            if use.goes_on:
                yield from self._resumed(sampler, buffer)
            if config.hold_sessions:
                yield from self._extended(sampler)
            if isinstance(self.engine, DraftEngine) and not use.name:
                yield from self._with_drafts(self.engine, sampler, buffer)
        for sampler in use.samplers:
            yield from self._decode(sampler)
        store = None if buffer is None else Result(buffer)
        if store is not None and use.rows_together:
            which = self._array((use.rows_together,))
            yield self._named("taken", Engine.taken_routes, store, which)
        if store is not None:
            some = self._array((share(config),))
            yield self._named("harvest", Engine.harvest, self.state, store, some, some)
        if use.goes_on and config.cache_pages:
            yield self._named("free", Engine.free_resource, self._array(()), self.state)

    def _resumed(self, sampler: Sampler, buffer: Program | None) -> Iterator[Program]:
        config = self.engine.config
        for bucket in resume_buckets(config):
            for rows in resume_rows(config):
                routes = None
                if buffer is not None:
                    which = self._array((rows,))
                    arguments = (Result(buffer), which, bucket)
                    stored = self._named("stored", Engine.stored_routes, *arguments)
                    yield stored
                    routes = Result(stored)
                resume = self._prefill("resume", (rows, bucket), 1, sampler, routes)
                yield resume
                yield self._insert("insert resumed", resume, (rows, 1))

    def _extended(self, sampler: Sampler) -> Iterator[Program]:
        config, number = self.engine.config, self._array(())
        keys = self._array((1, 1, 2), jnp.uint32)
        for bucket in resume_buckets(config):
            for size in extension_sizes(config, bucket):
                tokens = self._array((bucket,)), self._array((size,))
                arrays: tuple[Any, ...] = number, *tokens, number, number, keys, None
                arguments = self.params, self.state, Extension(*arrays), sampler
                extend = self._named("extend", Engine.extend, *arguments, tokens=size)
                yield extend
                yield self._insert("insert extended", extend, (1, 1))

    def _with_drafts(
        self, engine: DraftEngine, sampler: Sampler, buffer: Program | None
    ) -> Iterator[Program]:
        config = engine.config
        for bucket in resume_buckets(config):
            for rows in resume_rows(config):
                shape, keys = (rows, bucket), self._array((rows, 2), jnp.uint32)
                count, logp = self._array((rows,)), self._array(shape, jnp.float32)
                arrays: tuple[Any, ...] = self._array(shape), count, count, logp, keys, keys
                arguments = self.params, DraftRows(*arrays), sampler, engine.drafts
                tokens = rows * bucket
                scored = self._named(
                    "drafts", DraftEngine.prefill_drafts, *arguments, tokens=tokens
                )
                yield scored
                prefix, which = Result(scored, lambda result: result[0]), self._array((rows,))
                insert = prefix, self.state, self._array((rows, 1)), which
                yield self._named("insert drafts", Engine.bulk_insert, *insert)
                if buffer is not None:
                    store = prefix, Result(buffer), which
                    yield self._named("store drafts", DraftEngine.store_prefix_routes, *store)

    def _prefill(
        self,
        kind: str,
        shape: tuple[int, int],
        samples: int,
        sampler: Sampler,
        routes: Result | None,
    ) -> Program:
        rows = shape[0]
        keys = self._array((rows, samples, 2), jnp.uint32)
        arguments = (self._array(shape), self._array((rows,)), keys, sampler, None, routes)
        tokens = shape[0] * shape[1]
        return self._named(kind, Engine._prefill, self.params, *arguments, tokens=tokens)

    def _insert(self, kind: str, prefill: Program, shape: tuple[int, int]) -> Program:
        arguments = (Result(prefill), self.state, self._array(shape), self._array(shape[:1]))
        return self._named(kind, Engine.bulk_insert, *arguments)

    def _decode(self, sampler: Sampler) -> Iterator[Program]:
        config, empty = self.engine.config, jax.eval_shape(self.engine.init_decode_state)
        parts: list[int | None] = [None]
        if not self.engine.in_place(DecodeState(*empty)):
            # reads the whole cache in place, or copies a part of it
            parts = [config.max_length, *reads(config)[:-1]]
        for read in parts:
            arguments = (self.params, self.state, self._array(()), sampler, read)
            yield self._named("decode", Engine._generate, *arguments, tokens=config.slots)

    def _named(self, kind: str, function: Any, *arguments: Any, tokens: int = 0) -> Program:
        name = f"{kind} {self.use.name}".rstrip()
        return Program(name, function, (self.engine, *arguments), tokens=tokens)

    def _array(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """Returns the shape of an array from the host, replicated on all devices."""
        placement = self.engine.placement
        return struct(shape, dtype, None if placement is None else placement.sharding())
