"""The learner's programs: for every bucket its routes, forward, objective and backward, then the
sum of gradients and the optimiser's step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from compass_jax.base.aliases import Tree
from compass_jax.base.programs import Program, Result, struct
from compass_jax.base.records import (
    CONCENTRATION,
    EARLIER,
    FIRST,
    GOLD,
    PREDICTED,
    SAMPLED,
    TRUNCATED,
    TrainState,
)
from compass_jax.config import LearnerConfig
from compass_jax.model.moe import empty_routes
from compass_jax.model.precision import at_least_float32
from compass_jax.model.routes import put_routes, put_tokens, take_routes, take_tokens
from compass_jax.model.transformer import Transformer
from compass_jax.rl.bucketing import row_counts
from compass_jax.rl.prepare import UpdateRows
from compass_jax.training import step, trained


def training_programs(
    config: LearnerConfig, model: Transformer, state: TrainState, params: Tree, full: bool = False
) -> Iterator[Program]:
    """Yields the programs of `Learner.train`, the longest bucket first.

    Args:
        state, params: structs of the learner's state and of the model's parameters.
        full: whether to list only each bucket's full micro-batch, which every large rollout has.
    """
    lister = _Lister(config, model, params)
    prepare = lister.prepare()
    yield from (prepare, lister.mismatch())
    backward = None
    packed = config.updates.packed_row_tokens
    for length in [packed] if packed else reversed(config.updates.buckets):
        counts = row_counts(length, config.updates.micro_batch_tokens, lister.multiple)
        for count in counts[:1] if full else reversed(counts):
            *programs, backward = lister.micro_batch(length, count, prepare)
            yield from [*programs, backward]
    assert backward is not None  # a configuration has at least one bucket
    # Gradients have the same shapes for every micro-batch, so the last program stands for all.
    grads, total = Result(backward), Result(backward, summed)
    yield Program("add", step.accumulate, (total, grads))
    keywords = {"config": config.updates.optim, "total_steps": config.updates.total_updates}
    keywords |= {"decays": trained.decay_mask(config.lora, model, state.params)}
    keywords |= {"factor": struct((), jnp.float32), "betas": None}
    yield Program("apply", step.apply, (state, total), keywords)


def summed(grads: Tree) -> Tree:
    """Returns the structs of summed gradients: the gradients' shardings, in at least float32."""
    return jax.tree.map(lambda x: struct(x.shape, at_least_float32(x.dtype), x.sharding), grads)


@dataclass(frozen=True)
class _Lister:
    config: LearnerConfig
    model: Transformer
    params: Tree

    @property
    def multiple(self) -> int:
        placement = self.model.placement
        return 1 if placement is None else placement.rows_multiple

    def prepare(self, shape: tuple[int, int] | None = None) -> Program:
        """Returns the program of one update's advantages and weights, of all rows or of the `shape`
        of a micro-batch.
        """
        config, algorithm, updates = self.config, self.config.algorithm, self.config.updates
        groups = config.sampling.prompts_per_step // updates.updates_per_rollout
        rows = groups * config.sampling.capacity
        per_token = self._host(shape or (rows, updates.buckets[-1]), jnp.float32)
        per_response = self._host((rows,), jnp.float32)
        known, group = self._host((rows,), jnp.bool_), self._host((rows,), jnp.int32)
        mask = self._host(per_token.shape, jnp.bool_)
        sampled = self._host((rows, updates.buckets[-1]), jnp.bool_)
        reference = per_token if algorithm.uses_reference else None
        rates = {PREDICTED: per_response, CONCENTRATION: per_response, FIRST: known}
        columns = {
            **({GOLD: per_response} if config.labelled else {}),
            **({SAMPLED: sampled} if config.sampling.drafts is not None else {}),
            **({EARLIER: known} if config.sampling.held_groups else {}),
            **({TRUNCATED: known} if algorithm.mask_truncated else {}),
            **(rates if algorithm.advantage.reads_prediction else {}),
        }
        scores = per_token, per_token, per_token, reference
        places = None if shape is None else self._host(shape[:1], jnp.int32)
        numbers = per_response, columns, group, places
        inputs = UpdateRows(mask, per_response, known, group, *scores, *numbers)
        keywords = {"n_groups": groups, "config": algorithm, "scale": step.reward_scale(config)}
        name = "prepare" if shape is None else f"prepared {shape[1]}"
        return Program(name, step.prepare, (inputs,), keywords)

    def mismatch(self) -> Program:
        """Returns the program of the mismatch between rollout and training."""
        sampling = self.config.sampling
        shape = sampling.prompts_per_step * sampling.capacity, self.config.updates.buckets[-1]
        logp, mask = self._host(shape, jnp.float32), self._host(shape, jnp.bool_)
        return Program("mismatch", step.mismatch, (logp, logp, mask))

    def micro_batch(self, length: int, count: int, prepare: Program) -> Iterator[Program]:
        """Yields the programs that `count` rows of one bucket, or packed ones, run through."""
        model, tokens = self.model, self._host((count, length), jnp.int32)
        lengths, mode = self._host((count,), jnp.int32), self.config.algorithm.replay
        # A struct is only a shape and a dtype, so `tokens` also stands for segments, rows and
        # positions, and `lengths` for row numbers.
        segments = tokens if self.config.updates.packed_row_tokens else None
        predicted = self._host((count, length), jnp.bool_)
        all_routes = self._all_routes() if mode != "off" else None
        routes = None if all_routes is None else self._routes(all_routes, (count, length))
        if all_routes is not None and segments is not None:
            yield Program(f"replayed {length}", take_tokens, (all_routes, tokens, tokens))
        elif all_routes is not None:
            yield Program(f"replayed {length}", take_routes, (all_routes, lengths, length))

        def forward(name: str, routes: Tree) -> Program:
            temperature, n = self.config.rollout.temperature, count * length
            sequences = (tokens, lengths, routes, temperature, segments, predicted)
            arguments = (model, self.params, *sequences)
            return Program(f"{name} {length}", step.forward_and_pullback, arguments, tokens=n)

        scored = forward("forward", routes)
        yield scored
        if routes is not None and self.config.algorithm.uses_reference:
            yield forward("reference", None)
        if all_routes is not None and mode == "R2":
            used = Result(scored, lambda out: out[0][2])
            if segments is not None:
                places = (all_routes, tokens, tokens, used)
                yield Program(f"recorded {length}", put_tokens, places)
            else:
                yield Program(f"recorded {length}", put_routes, (all_routes, lengths, used))

        def batch(out: Tree) -> step.UpdateBatch:
            return self._batch(out[0], (tokens, lengths, routes))

        scores = (Result(scored, lambda out: out[0][0]), Result(scored, lambda out: out[0][3]))
        if mode != "R2" and not self.config.algorithm.objective.combines_responses:
            yield self.prepare(self._sequences((count, length)))
        share = self._host((), jnp.float32)
        static = (self.config.algorithm.objective, model.config, model.columns)
        arguments = (*scores, Result(prepare, batch), share, *static)
        objective = Program(f"objective {length}", step._objective_gradient, arguments)
        yield objective
        pullback = Result(scored, lambda out: out[1])
        pulled = (model, self.params, pullback, Result(objective, lambda out: out[0]))
        yield Program(f"backward {length}", step.pull, pulled, tokens=count * length)

    def _batch(self, prepared: Tree, sequences: tuple[Tree, Any, Any]) -> step.UpdateBatch:
        shape, places = self._sequences(sequences[0].shape), None
        if self.config.updates.packed_row_tokens:
            places = step.Places(*[self._host(shape[:1], jnp.int32)] * 3)

        def rows_of(x: Tree) -> Tree:
            return None if x is None else self._host(shape, x.dtype)

        old = self._host(shape, jnp.float32)
        return step.UpdateBatch(
            *sequences,
            mask=rows_of(prepared.mask),
            old_logp=old,
            old_entropy=old,
            ref_logp=old if self.config.algorithm.uses_reference else None,
            advantage=rows_of(prepared.advantage),
            weight=rows_of(prepared.weight),
            entropy_group=rows_of(prepared.entropy_group),
            kl_weight=rows_of(prepared.kl_weight),
            segments=None if places is None else sequences[0],
            predicted=self._host(sequences[0].shape, jnp.bool_),
            places=places,
        )

    def _sequences(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the number and the longest length of the sequences in a micro-batch's rows."""
        updates = self.config.updates
        if not updates.packed_row_tokens:
            return shape
        return shape[0] * (updates.packed_row_tokens // updates.buckets[0]), updates.buckets[-1]

    def _all_routes(self) -> Tree:
        """Returns the routes of a step's rows; None for a dense model."""
        config, placement = self.config, self.model.placement
        rows = config.sampling.prompts_per_step * config.sampling.capacity
        length = config.rollout.max_length
        routes = jax.eval_shape(lambda: empty_routes(self.model.config, rows, length))
        if routes is None or placement is None:
            return routes
        return struct(routes.shape, routes.dtype, placement.rows(rows))

    def _routes(self, all_routes: Tree, shape: tuple[int, int]) -> Tree:
        """Returns the routes of one micro-batch, on the devices of its rows."""
        placement, shape = self.model.placement, (*shape, *all_routes.shape[2:])
        if placement is None:
            return struct(shape, all_routes.dtype)
        spec = placement.spec(shape, ("batch", "tokens", None, None))
        return struct(shape, all_routes.dtype, placement.sharding(*spec))

    def _host(self, shape: tuple[int, ...], dtype: Any) -> Tree:
        """Returns an array from the host, replicated on every device."""
        placement = self.model.placement
        return struct(shape, dtype, None if placement is None else placement.sharding())
