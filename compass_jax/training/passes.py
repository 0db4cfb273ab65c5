"""Forward and backward passes over the micro-batches of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from compass_jax.base.aliases import Tree
from compass_jax.config import ConfigError, LearnerConfig
from compass_jax.devices.sharding import move
from compass_jax.model.transformer import Transformer
from compass_jax.rl.bucketing import MicroBatch
from compass_jax.rl.diagnostics import Diagnostics, merge_diagnostics
from compass_jax.rl.prepare import TRAINED, Prepared
from compass_jax.rl.row_plan import UpdatePlan
from compass_jax.training import step
from compass_jax.training.scored import (
    Scored,
    Sequences,
    put_rows,
    record_routes,
    same_numbers,
    sequences,
    update_batch,
)
from compass_jax.training.stops import never_stop, stoppable
from compass_jax.training.trace import TokenTrace

Gradient = tuple[Tree, Diagnostics]


@dataclass
class Passes:
    """The passes of one rollout.

    Args:
        params: the parameters; those of the next update are set after each.
        stopped: whether to stop; called before each micro-batch.
        progress: called after each micro-batch with (done, planned).
        temperature: of the policy whose log-probs are computed.
        planned: number of micro-batches of all passes.
    """

    config: LearnerConfig
    model: Transformer
    scored: Scored
    params: Tree
    reference: Tree
    temperature: float
    stopped: Callable[[], bool] = never_stop
    progress: Callable[[int, int], None] | None = None
    planned: int = 0
    done: int = 0

    def inputs(self, micro: MicroBatch) -> Sequences:
        """Returns a micro-batch's inputs with the routes on the devices of their rows: scoring and
        updates then run one program, whatever the routes' sharding was.
        """
        scored, placement = self.scored, self.model.placement
        inputs = sequences(scored.arrays, micro, scored.routes)
        if placement is None or inputs.routes is None:
            return inputs
        spec = placement.spec(inputs.routes.shape, ("batch", "tokens", None, None))
        return inputs._replace(routes=move(inputs.routes, placement.sharding(*spec)))

    def prepare(self, rows: slice, micro: MicroBatch | None = None) -> tuple[Prepared, Diagnostics]:
        """Computes advantages and weights of one update's rows, of those of `micro` alone or of
        all, and the diagnostics of rl.prepare. Returns the former on the host. Raises ValueError
        where `rows` are not whole groups.
        """
        capacity = self.config.sampling.capacity
        prepared, account = step.prepare(
            self.scored.rows_of(rows, capacity, micro),
            n_groups=(rows.stop - rows.start) // capacity,
            config=self.config.algorithm,
            scale=step.reward_scale(self.config),
        )
        return jax.device_get(prepared), account

    def score(self, micros: Sequence[MicroBatch], parts: list[Diagnostics]) -> None:
        """Scores micro-batches; appends the router's diagnostics to `parts`. For R2 the routes
        become those of this pass.
        """
        scored = self.scored
        for micro in stoppable(self.stopped, micros, parts):
            inputs = self.inputs(micro)
            logp, entropy, used_routes, diagnostics = self._score(self.params, inputs)
            self._keep(micro, inputs, logp, entropy)
            if self.config.algorithm.replay == "R2" and scored.routes is not None:
                # This pass replays no routes, so its replay metrics have no meaning.
                scored.routes = record_routes(scored.routes, micro, used_routes)
                diagnostics = {
                    k: value for k, value in diagnostics.items() if not k.startswith("replay/")
                }
            parts.append(diagnostics)
            self._advance(parts)

    def score_and_differentiate(
        self,
        update: UpdatePlan,
        parts: list[Diagnostics],
        *,
        compares: bool,
    ) -> Gradient | None:
        """Scores the trained rows of the first update and computes its gradient from the same
        forward passes; appends the router's diagnostics to `parts`. Returns what `differentiate`
        does for scored rows, bit for bit.

        Each micro-batch is prepared alone. A response's advantages and weights depend on the scores
        of that response alone, unless some are not finite (None: the gradient must be computed
        again) or the objective combines responses.

        Args:
            compares: whether to verify that the objective does not combine responses. Raises
                ConfigError where it does.
        """
        scored, objective = self.scored, self.config.algorithm.objective
        total, diagnostics = None, list[Diagnostics]()
        batches: list[tuple[MicroBatch, Sequences, step.UpdateBatch]] = []
        for micro in stoppable(self.stopped, update.trained, diagnostics):
            inputs = self.inputs(micro)
            (logp, entropy, _, aux), pullback = step.forward_and_pullback(
                self.model,
                self.params,
                *inputs[:3],
                self.temperature,
                inputs.segments,
                inputs.predicted,
            )
            self._keep(micro, inputs, logp, entropy)
            prepared, counted = self.prepare(update.rows, micro)
            batch = update_batch(scored, micro, inputs, prepared)
            share = share_of(batch, counted[TRAINED][0])
            grads, part = step.backward(
                self.model, self.params, logp, aux, pullback, batch, share, objective
            )
            total = step.add(total, grads)
            del grads, pullback  # frees their memory before the next forward and backward
            if compares:  # without routes, whose memory is freed
                batches.append((micro, inputs._replace(routes=None), batch._replace(routes=None)))
            diagnostics.append(part)
            parts.append(step.router_diagnostics(aux))
            self._advance(diagnostics)
        log_probs = scored.old_logp, scored.arrays.rollout_logp, scored.ref_logp
        if not all(x is None or np.isfinite(x).all() for x in (*log_probs, scored.old_entropy)):
            return None
        prepared = self.prepare(update.rows)[0] if batches else prepared
        for micro, inputs, batch in batches:
            now = update_batch(scored, micro, inputs, prepared, update.rows.start)
            if not same_numbers(batch, now):
                raise ConfigError(
                    f"rl.objective.name = {objective.name!r}: its class says combines_responses ="
                    " False, and the weights or groups of a response changed with the scores of"
                    " others; leave combines_responses out of the class"
                )
        return total, merge_diagnostics(diagnostics)

    def differentiate(
        self, update: UpdatePlan, prepared: Prepared, trace: TokenTrace | None = None
    ) -> Gradient:
        """Computes the gradient of one update of scored rows, and its diagnostics."""
        total = None
        parts: list[Diagnostics] = []
        tokens = np.float32(prepared.mask.sum())
        # Those of `batches`, in the same order, for the trace.
        micros = iter(update.trained)
        for batch in stoppable(self.stopped, self.batches(update, prepared), parts):
            grads, diagnostics, logp = step.gradients(
                self.model,
                self.params,
                batch,
                share_of(batch, tokens),
                objective=self.config.algorithm.objective,
                temperature=self.temperature,
            )
            total = step.add(total, grads)
            del grads  # frees their memory before the next forward and backward
            parts.append(diagnostics)
            self._advance(parts)
            if trace is not None:
                trace.update(next(micros), logp)
        return total, merge_diagnostics(parts)

    def batches(self, update: UpdatePlan, prepared: Prepared) -> Iterator[step.UpdateBatch]:
        """Yields the trained micro-batches of one update, while they are transferred to the
        devices.
        """
        for micro in update.trained:
            yield update_batch(self.scored, micro, self.inputs(micro), prepared, update.rows.start)

    def _advance(self, parts: Sequence[Tree]) -> None:
        """Counts a finished micro-batch and reports progress. It waits for all but the newest,
        since queued work is not done.
        """
        self.done += 1
        if self.progress is not None:
            jax.block_until_ready(parts[-2:-1])
            self.progress(self.done, max(self.done, self.planned))

    def _score(self, params: Tree, inputs: Sequences):
        return step.score(self.model, params, *inputs, temperature=self.temperature)

    def _keep(self, micro: MicroBatch, inputs: Sequences, logp: Array, entropy: Array) -> None:
        """Stores a micro-batch's scores, and computes the reference's."""
        put_rows(self.scored.old_logp, micro, logp)
        put_rows(self.scored.old_entropy, micro, entropy)
        if self.scored.ref_logp is not None:
            # The recorded routes are choices of the trained policy; the reference routes live.
            live = inputs._replace(routes=None)
            put_rows(self.scored.ref_logp, micro, self._score(self.reference, live)[0])


def share_of(batch: step.UpdateBatch, tokens: Array | np.float32) -> Array:
    """Returns the micro-batch's share of the update's trained tokens."""
    return jnp.float32(batch.mask.sum() / max(float(tokens), 1))
