"""The updates of one step: old log-probs of its groups, then all gradients and optimiser steps of
this rollout.

`score` and `gradients` work on micro-batches of the same rows, since a row's numbers depend on the
shape it is computed in.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.chips import chip_of
from compass_jax.config import RunConfig
from compass_jax.model.flops import forward_flops
from compass_jax.model.moe import empty_routes
from compass_jax.model.params import place
from compass_jax.model.transformer import Transformer
from compass_jax.records import TrainBatch, TrainState
from compass_jax.rl.bucketing import MicroBatch, padding_frac, plan
from compass_jax.rl.correction import mismatch
from compass_jax.rl.diagnostics import finalize_diagnostics, merge_diagnostics
from compass_jax.rl.prepare import Prepared
from compass_jax.rl.zero_variance import waste_of_dropped
from compass_jax.sharding import fetch, move
from compass_jax.train import step
from compass_jax.train.batch import StepArrays, micro_batch, put_routing, store_rows
from compass_jax.train.session import check_divergence


class Updater:
    """The trained model: its state, and a frozen reference where the objective has one."""

    config: RunConfig
    model: Transformer
    state: TrainState
    reference: Any

    def __init__(self, config: RunConfig, model: Transformer):
        self.config, self.rl, self.model = config, config.rl, model
        self.total_updates = self.rl.steps * self.rl.updates_per_rollout * self.rl.epochs

    def on_mesh(self, tree: Any) -> Any:
        """Parameters, or a state that has some, as the mesh stores them."""
        return place(tree, self.config.model, self.model.placement)

    def routes_on_mesh(self, store: Any) -> Any:
        """A routing store `[rows t l k]` on the devices that train; one from other devices may pass
        the host.
        """
        placement = self.model.placement
        if placement is None or store is None:
            return store
        return move(store, placement.rows(store.shape[0]))

    def batch(
        self,
        arrays: StepArrays,
        micro: MicroBatch,
        store: Any,
        prepared: Prepared | None = None,
        first_row: int = 0,
    ) -> TrainBatch:
        """`micro_batch`, its routes where the rows will be: scoring and updates then run one
        program, whatever laid out the store.
        """
        batch, placement = (
            micro_batch(arrays, micro, store, prepared, first_row),
            self.model.placement,
        )
        if placement is None or batch.routing is None:
            return batch
        where = placement.sharding(
            *placement.spec(batch.routing.shape, ("batch", "tokens", None, None))
        )
        return batch._replace(routing=move(batch.routing, where))

    def empty_store(self) -> Any:
        """Room for the routes of a step's samples, unset; None for a dense model."""
        return self.routes_on_mesh(
            empty_routes(
                self.config.model,
                self.rl.prompts_per_step * self.rl.capacity,
                self.config.rollout.max_length,
            )
        )

    def _train(self, arrays: StepArrays, store, dropped_tokens: int) -> dict[str, float]:
        """Scores at the old parameters, then all updates of this rollout."""
        started = time.perf_counter()
        groups = self.rl.prompts_per_step // self.rl.updates_per_rollout
        updates = [
            self._plan(arrays, u * groups, groups) for u in range(self.rl.updates_per_rollout)
        ]
        store, scored = self._score(arrays, store, [micro for plans in updates for micro in plans])
        scored_s = time.perf_counter() - started
        prepared = [self._prepare(arrays, u * groups, groups) for u in range(len(updates))]
        parts, norms = [], []
        for _ in range(self.rl.epochs):
            for plans, (rows, first_row, _) in zip(updates, prepared, strict=True):
                found, applied = self._update(arrays, store, plans, rows, first_row)
                parts.append(found)
                norms.append(applied)
                check_divergence(
                    int(self.state.bad_steps), self.rl.optim.max_bad_steps, self.config.directory
                )
        accounts = [scored, waste_of_dropped(dropped_tokens), *(found for _, _, found in prepared)]
        total = finalize_diagnostics(merge_diagnostics([*parts, *accounts]))
        seconds, tokens = time.perf_counter() - started, int(arrays.lengths.sum())
        metrics = {name: float(value) for name, value in fetch(total).items()}
        metrics["loss"] /= len(parts)
        metrics |= {name: float(np.mean([float(n[name]) for n in norms])) for name in norms[0]}
        updates = {
            "time/score_s": scored_s,
            "time/update_s": seconds - scored_s,
            "train/tokens_per_s": tokens / seconds,
        }
        updates |= self._mfu(arrays.lengths, seconds)
        return {**metrics, **updates, "skipped_updates": float(self.state.skipped)}

    def _mfu(self, lengths: np.ndarray, seconds: float) -> dict[str, float]:
        """train/mfu: what forward and backward of these rows must compute, over what the devices
        could have; old log-probs count as overhead.

        Empty on a chip whose peak is not known (compass_jax/chips.py).
        """
        chip = chip_of(jax.devices()[0].device_kind)
        if chip is None:
            return {}
        devices = 1 if self.model.placement is None else self.model.placement.mesh.size
        return {
            "train/mfu": 3
            * self.rl.epochs
            * forward_flops(self.config.model, lengths)
            / (seconds * devices * chip.device_flops)
        }

    def _plan(self, arrays: StepArrays, first_group: int, groups: int) -> list[MicroBatch]:
        """The micro-batches of one update. Scoring uses the same ones: a row's numbers depend on
        the shape it is computed in.
        """
        first, last = first_group * self.rl.capacity, (first_group + groups) * self.rl.capacity
        # groups that did not grow leave rows empty
        held = first + np.flatnonzero(arrays.lengths[first:last])
        multiple = 1 if self.model.placement is None else self.model.placement.rows_multiple
        plans = plan(
            arrays.lengths[held],
            self.rl.buckets,
            self.rl.micro_batch_tokens,
            rows_multiple=multiple,
        )
        return [
            micro._replace(rows=np.where(micro.rows < 0, -1, held[micro.rows])) for micro in plans
        ]

    def _score(self, arrays: StepArrays, store, plans: list[MicroBatch]):
        """Fills old log-probs and entropies; returns the routing to replay in the updates (None:
        live) and diagnostics.
        """
        mode = self.rl.replay if self.config.model.moe_layers else "off"
        temperature, parts = self.config.rollout.temperature, []
        if mode == "R2":
            # nothing is set, so scoring routes live, in the program that will replay
            store = self.empty_store()
        if self.reference is not None:
            arrays.ref_logp = np.zeros_like(arrays.old_logp)
        for micro in plans:
            batch = self.batch(arrays, micro, None if mode == "off" else store)
            logp, entropy, routing, found = step.score(
                self.model, self.state.params, batch, temperature=temperature
            )
            _put(arrays.old_logp, micro, logp)
            _put(arrays.old_entropy, micro, entropy)
            if mode == "R2":
                store = put_routing(store, store_rows(micro, store), routing)
                found = {
                    name: value for name, value in found.items() if not name.startswith("replay/")
                }
            if self.reference is not None:
                live = batch._replace(routing=None)
                _put(
                    arrays.ref_logp,
                    micro,
                    step.score(self.model, self.reference, live, temperature=temperature)[0],
                )
            parts.append(found)
        found = merge_diagnostics(
            [
                *parts,
                mismatch(
                    jnp.asarray(arrays.old_logp),
                    jnp.asarray(arrays.rollout_logp),
                    jnp.asarray(arrays.mask),
                ),
            ]
        )
        entropy = (
            np.float32(np.sum(arrays.old_entropy, where=arrays.mask)),
            np.float32(max(arrays.mask.sum(), 1)),
        )
        found["entropy_nats"] = tuple(jnp.asarray(x) for x in entropy)
        found["padding_frac"] = (jnp.float32(padding_frac(plans, arrays.lengths)), jnp.float32(1))
        return (None if mode == "off" else store), found

    def _prepare(self, arrays: StepArrays, first_group: int, groups: int):
        """(advantages and weights of one update's rows, the first of these rows, diagnostics)."""
        rows = slice(first_group * self.rl.capacity, (first_group + groups) * self.rl.capacity)
        group = np.where(arrays.group[rows] < 0, -1, arrays.group[rows] - first_group)
        prepared, found = step.prepare(
            arrays.mask[rows],
            arrays.old_entropy[rows],
            arrays.reward[rows],
            arrays.known[rows],
            group,
            n_groups=groups,
            config=self.rl,
            right_at=self.config.rewards.right_at,
            wrong_at=self.config.rewards.wrong_at,
            max_new_tokens=self.config.rollout.max_new_tokens,
            repetition=arrays.repetition[rows],
            old_logp=arrays.old_logp[rows],
            rollout_logp=arrays.rollout_logp[rows],
        )
        return jax.device_get(prepared), rows.start, found

    def _update(
        self, arrays: StepArrays, store, plans: list[MicroBatch], prepared: Prepared, first_row: int
    ):
        """One optimiser update in micro-batches; `prepared` has its rows, which begin at
        `first_row` of `arrays`.
        """
        tokens, total, parts = max(int(prepared.mask.sum()), 1), None, []
        for micro in plans:
            batch = self.batch(arrays, micro, store, prepared, first_row)
            share = jnp.float32(batch.mask.sum() / tokens)
            grads, found = step.gradients(
                self.model,
                self.state.params,
                batch,
                share,
                config=self.rl,
                temperature=self.config.rollout.temperature,
            )
            total = step.add(total, grads)
            del grads  # else they would lie there through the next forward and backward
            parts.append(found)
        self.state, applied = step.apply(
            self.state, total, config=self.rl.optim, total_steps=self.total_updates
        )
        # nothing, unless the compiler laid a part of it elsewhere
        self.state = self.on_mesh(self.state)
        return merge_diagnostics(parts), applied


def _put(target: np.ndarray, micro, values) -> None:
    real = micro.rows >= 0
    length = min(target.shape[1], micro.length)
    target[micro.rows[real], :length] = fetch(values)[real, :length]
