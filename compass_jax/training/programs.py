"""The programs that the learner runs: for every bucket its routes, forward, objective and backward,
then the sum of gradients and the optimiser's step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from compass_jax.config import RunConfig
from compass_jax.model.moe import empty_routes
from compass_jax.model.params import decays
from compass_jax.model.precision import at_least_float32
from compass_jax.model.routes import put_routes, take_routes
from compass_jax.model.transformer import Transformer
from compass_jax.programs import Program, Result, struct
from compass_jax.records import TrainState
from compass_jax.rl.bucketing import row_counts
from compass_jax.training import step


def training_programs(
    config: RunConfig, model: Transformer, state: TrainState, full: bool = False
) -> Iterator[Program]:
    """What `Learner.train` runs, the longest bucket first; `state` is of structs.

    full: of each bucket only the micro-batch that is full, which every long rollout has.
    """
    lister = _Lister(config, model, state)
    prepare = lister.prepare()
    yield prepare
    backward = None
    for length in reversed(config.rl.buckets):
        counts = row_counts(length, config.rl.micro_batch_tokens, lister.multiple)
        for count in counts[:1] if full else reversed(counts):
            *programs, backward = lister.micro_batch(length, count, prepare)
            yield from [*programs, backward]
    assert backward is not None  # there is a bucket
    grads, total = Result(backward), Result(backward, summed)
    yield Program("add", step.accumulate, (total, grads))
    keywords = {"config": config.rl.optim, "total_steps": config.rl.total_updates}
    keywords |= {"decays": decays(config.model, model.layout)}
    yield Program("apply", step.apply, (state, total), keywords)


def summed(grads: Any) -> Any:
    """Structs of what gradients add up to: each as its gradient lies, in at least float32."""
    return jax.tree.map(lambda x: struct(x.shape, at_least_float32(x.dtype), x.sharding), grads)


@dataclass(frozen=True)
class _Lister:
    config: RunConfig
    model: Transformer
    state: TrainState

    @property
    def multiple(self) -> int:
        placement = self.model.placement
        return 1 if placement is None else placement.rows_multiple

    def prepare(self) -> Program:
        """Advantages and weights of one update's rows."""
        config, rl = self.config, self.config.rl
        groups = rl.prompts_per_step // rl.updates_per_rollout
        rows = groups * rl.capacity
        of_tokens = self._host((rows, rl.buckets[-1]), jnp.float32)
        of_rows = self._host((rows,), jnp.float32)
        known, group = self._host((rows,), jnp.bool_), self._host((rows,), jnp.int32)
        mask = self._host(of_tokens.shape, jnp.bool_)
        keywords = {
            "n_groups": groups,
            "config": rl,
            "right_at": config.rewards.right_at,
            "wrong_at": config.rewards.wrong_at,
            "max_new_tokens": config.rollout.max_new_tokens,
            "repetition": of_rows,
            "old_logp": of_tokens,
            "rollout_logp": of_tokens,
            "ref_logp": of_tokens if rl.uses_reference else None,
            "gold": of_rows if config.data.labelled else None,
        }
        return Program("prepare", step.prepare, (mask, of_tokens, of_rows, known, group), keywords)

    def micro_batch(self, length: int, count: int, prepare: Program) -> Iterator[Program]:
        """All that `count` rows of one bucket go through."""
        model, tokens = self.model, self._host((count, length), jnp.int32)
        lengths, mode = self._host((count,), jnp.int32), self.config.rl.replay
        whole = self._all_routes() if mode != "off" else None
        routes = None if whole is None else self._routes(whole, (count, length))
        if whole is not None:
            yield Program(f"replayed {length}", take_routes, (whole, lengths, length))

        def forward(name: str, routes: Any) -> Program:
            temperature, n = self.config.rollout.temperature, count * length
            given = (model, self.state.params, tokens, lengths, routes, temperature)
            return Program(f"{name} {length}", step.forward_and_pullback, given, tokens=n)

        scored = forward("forward", routes)
        yield scored
        if routes is not None and self.config.rl.uses_reference:
            yield forward("reference", None)
        if whole is not None and mode == "R2":
            used = Result(scored, lambda found: found[0][2])
            yield Program(f"recorded {length}", put_routes, (whole, lengths, used))

        def batch(found: Any) -> step.UpdateBatch:
            return self._batch(found[0], (tokens, lengths, routes))

        given = (Result(scored, lambda found: found[0][0]), Result(scored, lambda x: x[0][3]))
        share = self._host((), jnp.float32)
        static = (self.config.rl, model.config, model.columns)
        arguments = (*given, Result(prepare, batch), share, *static)
        objective = Program(f"objective {length}", step._objective_gradient, arguments)
        yield objective
        pullback = Result(scored, lambda found: found[1])
        pulled = (model, self.state.params, pullback, Result(objective, lambda found: found[0]))
        yield Program(f"backward {length}", step.pull, pulled, tokens=count * length)

    def _batch(self, prepared: Any, sequences: tuple[Any, Any, Any]) -> step.UpdateBatch:
        shape = sequences[0].shape

        def taken(x: Any) -> Any:
            return None if x is None else self._host(shape, x.dtype)

        old = self._host(shape, jnp.float32)
        return step.UpdateBatch(
            *sequences,
            mask=taken(prepared.mask),
            old_logp=old,
            old_entropy=old,
            ref_logp=old if self.config.rl.uses_reference else None,
            advantage=taken(prepared.advantage),
            weight=taken(prepared.weight),
            entropy_group=taken(prepared.entropy_group),
            kl_weight=taken(prepared.kl_weight),
        )

    def _all_routes(self) -> Any:
        """The routes of a step's rows; None for a dense model."""
        config, placement = self.config, self.model.placement
        rows = config.rl.prompts_per_step * config.rl.capacity
        length = config.rollout.max_length
        routes = jax.eval_shape(lambda: empty_routes(config.model, rows, length))
        if routes is None or placement is None:
            return routes
        return struct(routes.shape, routes.dtype, placement.rows(rows))

    def _routes(self, whole: Any, shape: tuple[int, int]) -> Any:
        """Those of one micro-batch, where its rows will be."""
        placement, shape = self.model.placement, (*shape, *whole.shape[2:])
        if placement is None:
            return struct(shape, whole.dtype)
        spec = placement.spec(shape, ("batch", "tokens", None, None))
        return struct(shape, whole.dtype, placement.sharding(*spec))

    def _host(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array from the host: every device has it whole."""
        placement = self.model.placement
        return struct(shape, dtype, None if placement is None else placement.sharding())
