"""A model that clients train: a Learner, and the gradient that adds up between its updates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from compass_jax.apps.tinker.errors import RequestError
from compass_jax.apps.tinker.losses import Loss, loss_of
from compass_jax.apps.tinker.rows import Rows
from compass_jax.apps.tinker.sample_routes import Replay, SampleRoutes
from compass_jax.apps.tinker.states import abstract_of
from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.devices.sharding import move
from compass_jax.model.routes import take_tokens
from compass_jax.rl.bucketing import MicroBatch, plan, take_rows
from compass_jax.rl.diagnostics import Diagnostics, finalize_diagnostics, merge_diagnostics
from compass_jax.training import optim, step
from compass_jax.training.learner import Learner
from compass_jax.training.scored import put_rows

NO_CLIPPING = 1e12  # gradient norm of the client's grad_clip_norm = 0


class Adam(NamedTuple):
    """The parameters of one update."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class Passed(NamedTuple):
    """The result of a training request."""

    logp: Sequence[np.ndarray]  # of each datum's targets
    metrics: dict[str, float]


class TrainedModel:
    """A model and its gradient. All methods belong to the thread of the devices.

    Args:
        learner: whose state is trained.
        routes: the routes of samples, of any model of this architecture.
    """

    def __init__(self, learner: Learner, routes: SampleRoutes):
        self.learner, self._routes = learner, routes
        self.gradient: Tree | None = None

    # ---- training --------------------------------------------------------------------------------

    def passes(self, rows: Rows, loss: Loss, forward_only: bool) -> Generator[None, None, Passed]:
        """Runs a request's micro-batches, one between two yields, and adds its gradient unless it
        is `forward_only`. Returns the log-probs and the metrics.
        """
        learner, replay = self.learner, self._routes.locate(rows)
        settings, placement = learner.update_settings, learner.model.placement
        multiple = 1 if placement is None else placement.rows_multiple
        total: Tree | None = None
        parts: list[Diagnostics] = []
        logps = np.zeros(rows.tokens.shape, np.float32)
        for micro in plan(
            rows.lengths, settings.buckets, settings.micro_batch_tokens, rows_multiple=multiple
        ):
            batch = self._batch(rows, replay, micro)
            gradient, diagnostics, logp = self._pass(batch, loss, forward_only)
            if gradient is not None:
                total = step.add(total, gradient)
            del gradient
            if loss.is_policy:
                diagnostics |= step.mismatch(logp, batch.old_logp, batch.mask)
            parts.append(diagnostics)
            put_rows(logps, micro, logp)
            yield
        if total is not None:
            self.gradient = total if self.gradient is None else step.add(self.gradient, total)
        metrics = _named_metrics(merge_diagnostics(parts))
        metrics["routes/replayed_tokens:sum"] = float(replay.tokens)
        metrics["routes/missing_datums:sum"] = float(replay.missing)
        logps = np.where(rows.predicted, logps, 0)
        lengths = rows.lengths.tolist()
        return Passed([logps[i, 1:n] for i, n in enumerate(lengths)], metrics)

    def _pass(
        self, batch: step.UpdateBatch, loss: Loss, forward_only: bool
    ) -> tuple[Tree | None, Diagnostics, Array]:
        """Returns a micro-batch's gradient, its diagnostics and its log-probs."""
        learner, objective = self.learner, loss.objective
        model, params = learner.model, learner.params
        if not forward_only:
            return step.gradients(
                model,
                params,
                batch,
                jnp.float32(1),
                objective=objective,
                temperature=learner.temperature,
            )
        logp, _, _, diagnostics = step.score(
            model,
            params,
            batch.tokens,
            batch.lengths,
            batch.routes,
            None,
            batch.predicted,
            temperature=learner.temperature,
        )
        arrays = batch.old_logp, batch.advantage, batch.weight, batch.mask
        losses = loss_of(logp, *arrays, objective=objective, columns=model.columns)
        return None, losses | diagnostics, logp

    def _batch(self, rows: Rows, replay: Replay, micro: MicroBatch) -> step.UpdateBatch:
        """Returns a micro-batch of a request's rows, with the routes that it replays."""

        def take(x: np.ndarray, fill: int = 0) -> Tree:
            return take_rows(x, micro.rows, micro.length, fill)

        mask = take(rows.mask)
        entropy: Tree = np.zeros(mask.shape, np.float32)  # no served loss reads it
        return step.UpdateBatch(
            tokens=take(rows.tokens),
            lengths=take(rows.lengths),
            routes=self._replayed(
                take(replay.rows, len(self._routes.buffer)), take(replay.positions)
            ),
            mask=mask,
            old_logp=take(rows.old_logp),
            old_entropy=entropy,
            ref_logp=None,
            advantage=take(rows.advantage),
            weight=mask.astype(np.float32),
            entropy_group=None,
            predicted=take(rows.predicted),
        )

    def _replayed(self, rows: np.ndarray, positions: np.ndarray) -> Tree:
        """Returns the routes of tokens by their places; unset out of range, None for a dense
        model.
        """
        if not self._routes.keeps:
            return None
        routes = take_tokens(self._routes.stored(), jnp.asarray(rows), jnp.asarray(positions))
        placement = self.learner.model.placement
        if placement is None:
            return routes
        spec = placement.spec(routes.shape, ("batch", "tokens", None, None))
        return move(routes, placement.sharding(*spec))

    def update(self, adam: Adam) -> dict[str, float]:
        """Takes an optimiser step with the gradient so far. Raises RequestError without one."""
        if self.gradient is None:
            raise RequestError("optim_step: there is no gradient; call forward_backward before it")
        learner, optimizer = self.learner, self.learner.update_settings.optim
        optimizer = dataclasses.replace(
            optimizer,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            clip_grad_norm=adam.grad_clip_norm or NO_CLIPPING,
        )
        optimizer.validate()
        learner.update_settings = dataclasses.replace(learner.update_settings, optim=optimizer)
        learner.rate, learner.betas = adam.learning_rate, (adam.beta1, adam.beta2)
        gradient, self.gradient = self.gradient, None
        applied = learner.apply(gradient)
        metrics = {name: float(value) for name, value in jax.device_get(applied).items()}
        return {**metrics, "policy_version": float(learner.version)}

    # ---- its state -------------------------------------------------------------------------------

    def saved(self) -> tuple[Tree, JsonObject]:
        """Returns the arrays of a saved state, and what is saved beside them."""
        arrays: JsonObject = {"params": self.learner.state.params}
        arrays["optimizer"] = self.learner.state._replace(params=())
        if self.gradient is not None:
            arrays["gradient"] = self.gradient
        lora = self.learner.config.lora
        options = {"rank": lora.rank, "targets": list(lora.targets)}
        return arrays, {**options, "has_gradient": self.gradient is not None}

    def shapes(self, meta: JsonObject, optimizer: bool) -> Tree:
        """Returns the shapes of a saved state's arrays."""
        on_mesh, state = self.learner.model.placement is not None, self.learner.state
        arrays: JsonObject = {"params": abstract_of(state.params, on_mesh)}
        if optimizer:
            arrays["optimizer"] = abstract_of(state._replace(params=()), on_mesh)
            if meta["has_gradient"]:
                arrays["gradient"] = abstract_of(
                    jax.eval_shape(optim.widen, state.params), on_mesh=False
                )
        return arrays

    def restore(self, arrays: JsonObject) -> None:
        """Continues from the arrays of a saved state; without those of the optimiser it begins
        anew.
        """
        learner, settings = self.learner, self.learner.update_settings
        params, state = arrays["params"], arrays.get("optimizer")
        if state is None:
            state = optim.init_state(params, settings.optim, settings.total_updates)
        else:
            state = state._replace(params=params)
        fresh = Learner(learner.config, learner.model, state, None, learner.frozen)
        self.learner, self.gradient = fresh, arrays.get("gradient")


def _named_metrics(diagnostics: Diagnostics) -> dict[str, float]:
    """Returns metrics by the client's names, which end with how several requests are combined."""
    metrics = {}
    for name, value in jax.device_get(finalize_diagnostics(diagnostics)).items():
        kind = "sum" if name == "loss" else "max" if name.endswith("_max") else "mean"
        number = float(value)
        metrics[f"{name}:{kind}"] = number if math.isfinite(number) else math.nan
    return metrics
