"""The learner: scores a rollout at the parameters before its first update, then updates them. It
takes arrays only, without prompts, files or engine, so other programs can use it as a library:

    model = Transformer(config.model, config.compute)
    learner = Learner.start(LearnerConfig(), model, init_params(config.model, config.compute, key))
    for arrays in rollouts:  # records.StepArrays from any sampler
        scored = learner.score(arrays)
        for rows in learner.updates:
            metrics = learner.update(scored, rows)
    learner.params

Scores and gradients use micro-batches of the same rows, since a row's numbers depend on the shape
in which it is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from compass_jax.aliases import Tree
from compass_jax.chips import chip_of
from compass_jax.config import LearnerConfig
from compass_jax.model.flops import forward_flops
from compass_jax.model.moe import empty_routes
from compass_jax.model.params import place
from compass_jax.model.transformer import Transformer
from compass_jax.programs import Program, struct
from compass_jax.records import Outcome, StepArrays, TrainState
from compass_jax.rl.bucketing import MicroBatch, plan, row_counts
from compass_jax.rl.diagnostics import Diagnostics, finalize_diagnostics, merge_diagnostics
from compass_jax.rl.prepare import Prepared
from compass_jax.rl.zero_variance import waste_of_dropped, waste_of_replaced
from compass_jax.sharding import fetch, move
from compass_jax.training import optim, step, trained
from compass_jax.training.programs import training_programs
from compass_jax.training.scored import (
    Scored,
    Sequences,
    put_rows,
    record_routes,
    same_numbers,
    score_account,
    sequences,
    update_batch,
)
from compass_jax.training.stops import never_stop, stoppable
from compass_jax.training.trace import TokenTrace

STATE = "Learner.state"  # where the weights are for a learner without a run directory


class Learner:
    """The trained model: its `state`; the `frozen` base of adapters (config.lora); and a frozen
    `reference` where the objective needs one, which for adapters is their base.
    """

    def __init__(
        self,
        config: LearnerConfig,
        model: Transformer,
        state: TrainState,
        reference: Tree = None,
        frozen: Tree = None,
        directory: str = STATE,
    ):
        """Creates a learner from trees in the layout of `model`; over a mesh they are moved to its
        shardings. `directory` has the last good weights, for an error message.
        """
        self.config, self.model, self.directory = config, model, directory
        self.algorithm, self.update_settings = config.algorithm, config.updates
        sampling = config.sampling
        self.capacity, self.groups = sampling.capacity, sampling.prompts_per_step
        self.state: TrainState = self._on_mesh(state)
        self.reference, self.frozen = self._on_mesh(reference), self._on_mesh(frozen)
        if config.algorithm.uses_reference and frozen is not None:
            self.reference = self.frozen
        # called after each micro-batch of `train` with (done, total), those of the pass for old
        # log-probs and of every epoch counted
        self.progress: Callable[[int, int], None] | None = None
        # mean advantage of each response `[b]` in the rollout that `train` was last given
        self.advantage = np.zeros(0)
        self._done = self._planned = 0
        self._replay = config.algorithm.replay if model.config.moe_layers else "off"
        # R2 replays routes that must be recorded before the forward pass of the update
        self._one_pass = self._replay != "R2"
        # Whether more than metrics depends on the scores of idle rows: an objective of the user's
        # may combine responses.
        self._reads_idle = (
            self._replay == "R2"
            or config.algorithm.correction.acts
            or not type(config.algorithm.objective).__module__.startswith("compass_jax.")
        )

    @classmethod
    def start(
        cls,
        config: LearnerConfig,
        model: Transformer,
        params: Tree,
        directory: str = STATE,
    ) -> Learner:
        """Returns a learner at `params` with a fresh optimiser. They are also its reference if
        `rl.objective.kl_coef` needs one. Raises ConfigError for settings that cannot be used.
        """
        config.validate()
        key = jax.random.fold_in(jax.random.key(config.seed), trained.ADAPTERS)
        tree, frozen = trained.split(config.lora, model, params, key)
        state = optim.init_state(tree, config.updates.optim, config.updates.total_updates)
        copies = config.algorithm.uses_reference and frozen is None
        # A copy, since the first update donates the parameters.
        reference = jax.tree.map(jnp.copy, params) if copies else None
        return cls(config, model, state, reference, frozen, directory)

    @property
    def params(self) -> Tree:
        """The model's parameters, with adapters in their places."""
        return trained.full(self.config.lora, self.state.params, self.frozen)

    @property
    def version(self) -> int:
        """The policy's version: optimiser steps taken."""
        return int(self.state.step)

    @property
    def updates(self) -> list[slice]:
        """The rows of each update of a rollout: whole groups of `rl.capacity` rows."""
        updates = self.update_settings.updates_per_rollout
        size = self.groups // updates * self.capacity
        return [slice(u * size, (u + 1) * size) for u in range(updates)]

    def programs(self) -> Iterator[Program]:
        """Yields the programs that `train` runs on full micro-batches, for compilation ahead of the
        first step.
        """
        mesh = self.model.placement is not None

        def of(x: jax.Array) -> jax.ShapeDtypeStruct:
            return struct(x.shape, x.dtype, x.sharding if mesh else None)

        state, params = jax.tree.map(of, (self.state, self.params))
        return training_programs(self.config, self.model, state, params, full=True)

    # ---- one rollout -----------------------------------------------------------------------------

    def train(
        self,
        arrays: StepArrays,
        dropped_tokens: int = 0,
        stopped: Callable[[], bool] = never_stop,
        trace: TokenTrace | None = None,
        replaced: Sequence[Outcome] = (),
    ) -> dict[str, float]:
        """Trains on a whole rollout: scores it, then runs every update of every epoch. Returns the
        metrics.

        Args:
            dropped_tokens: tokens that were generated and are not in `arrays`; they are counted as
                waste.
            stopped: whether to stop; called before each micro-batch until the first update.
            trace: filled in with the numbers of its rows' tokens.
            replaced: sampled groups whose places in `arrays` replayed groups have; their tokens and
                kinds are counted.

        Raises:
            TrainingDiverged: `rl.optim.max_bad_steps` consecutive updates had no finite gradient.
            TrainingStopped: `stopped()` was true before the first update; nothing has changed.
        """
        started = time.perf_counter()
        first, *later = self.updates
        one_pass, epochs = self._one_pass, self.update_settings.epochs
        scored = self._unscored(arrays)
        scored.skipped = self._unread(scored, () if trace is None else trace.rows)
        counts = [len(self._trained(scored, rows)) for rows in self.updates]
        total = sum(len(self._all(scored, rows)) for rows in self.updates)
        # With one pass, the first update's forward passes give scores and gradient, and count once.
        self._done, self._planned = 0, total + sum(counts) * epochs - one_pass * counts[0]
        parts = self._score_rows(scored, later if one_pass else self.updates, stopped)
        scored_s = time.perf_counter() - started
        # The first update begins at the scored policy, where every ratio is 1: nothing to trace.
        ratios = trace if epochs * len(counts) > 1 else None
        first_gradient = (
            self._score_and_differentiate(scored, first, parts, stopped) if one_pass else None
        )
        self._account(scored, parts)
        # Advantages depend on the old policy only, so those of later updates are known by now.
        prepared = [(rows, *self.prepare(scored, rows)) for rows in self.updates]
        self.advantage = np.concatenate([x.of_responses() for _, x, _ in prepared])
        if trace is not None:
            trace.begin(scored, [(rows, x) for rows, x, _ in prepared])
        updates: list[Diagnostics] = []
        optimizer_metrics: list[dict] = []
        for rows, prepared_rows, _ in prepared * epochs:
            # After an update a stop waits for the others: no checkpoint holds half a step.
            should_stop = never_stop if optimizer_metrics else stopped
            total, diagnostics = first_gradient or self._differentiate(
                scored, rows, prepared_rows, should_stop, ratios
            )
            first_gradient = None
            updates.append(diagnostics)
            optimizer_metrics.append(self._take(total))
            del total  # frees the gradient's memory before the next update
        if ratios is not None:
            ratios.finish(self.algorithm.objective, self.model.columns)
        accounts = [
            scored.diagnostics,
            waste_of_dropped(dropped_tokens),
            waste_of_replaced(replaced),
            *(account for _, _, account in prepared),
        ]
        metrics = self._metrics(updates, optimizer_metrics, accounts)
        seconds, tokens = time.perf_counter() - started, int(arrays.lengths.sum())
        metrics |= {
            "time/score_s": scored_s,
            "time/update_s": seconds - scored_s,
            "train/tokens_per_s": tokens / seconds,
        }
        trained_rows = slice(None) if scored.idle is None else ~scored.idle
        return metrics | self._mfu(arrays.lengths[trained_rows], seconds)

    def score(self, arrays: StepArrays, stopped: Callable[[], bool] = never_stop) -> Scored:
        """Computes old log-probs and entropies of every row, the reference's log-probs, and the
        routes that the updates replay: the rollout's (R3), those of this pass (R2) or none (off).
        Stops like `train`.
        """
        scored = self._unscored(arrays)
        self._account(scored, self._score_rows(scored, self.updates, stopped))
        return scored

    def update(self, scored: Scored, rows: slice) -> dict[str, float]:
        """Runs one optimiser step on `rows` of a scored rollout: advantages and weights, gradients
        summed over micro-batches, apply. Returns the metrics; `state` is replaced.

        Raises TrainingDiverged like `train`, and ValueError where `rows` are not whole groups.
        """
        prepared, account = self.prepare(scored, rows)
        grads, diagnostics = self._differentiate(scored, rows, prepared)
        return self._metrics([diagnostics], [self._take(grads)], [account])

    def prepare(self, scored: Scored, rows: slice) -> tuple[Prepared, Diagnostics]:
        """Computes advantages and weights of one update's rows (rl/prepare.py) on the host, and the
        account of its tokens. Raises ValueError where `rows` are not whole groups.
        """
        arrays, capacity = scored.arrays, self.capacity
        if rows.start % capacity or rows.stop % capacity or rows.step not in (None, 1):
            raise ValueError(
                f"Learner: rows {rows.start}:{rows.stop} do not cover whole groups of"
                f" {capacity} rows; take one of Learner.updates"
            )
        # Groups are numbered within the rollout, in `step.prepare` within the update.
        group = np.where(arrays.group[rows] < 0, -1, arrays.group[rows] - rows.start // capacity)
        prepared, account = step.prepare(
            arrays.mask[rows],
            scored.old_entropy[rows],
            arrays.reward[rows],
            arrays.known[rows],
            group,
            n_groups=(rows.stop - rows.start) // capacity,
            config=self.algorithm,
            right_at=self.config.rewards.right_at,
            wrong_at=self.config.rewards.wrong_at,
            max_new_tokens=self.config.rollout.max_new_tokens,
            repetition=arrays.repetition[rows],
            old_logp=scored.old_logp[rows],
            rollout_logp=arrays.rollout_logp[rows],
            ref_logp=None if scored.ref_logp is None else scored.ref_logp[rows],
            gold=None if arrays.gold is None else arrays.gold[rows],
            replayed=None if arrays.replayed is None else arrays.replayed[rows],
            sampled=None if arrays.sampled is None else arrays.sampled[rows],
        )
        return jax.device_get(prepared), account

    def batches(
        self, scored: Scored, rows: slice, prepared: Prepared
    ) -> Iterator[step.UpdateBatch]:
        """Yields the micro-batches of one update, without idle rows, while they are transferred to
        the devices.
        """
        for micro in self._trained(scored, rows):
            inputs = self._sequences(scored.arrays, micro, scored.routes)
            yield update_batch(scored, micro, inputs, prepared, rows.start)

    # ---- parts -----------------------------------------------------------------------------------

    def _unscored(self, arrays: StepArrays) -> Scored:
        """Returns a rollout whose log-probs and entropies are 0 until its rows are scored, with the
        routes that the forward passes take.
        """
        mode, routes = self._replay, None
        if mode == "R2":
            # Unset rows: each token chooses its experts live, in the program that the updates use.
            routes = empty_routes(
                self.model.config, len(arrays.lengths), self.config.rollout.max_length
            )
        elif mode == "R3":
            routes = arrays.routes
        old_logp, old_entropy = (
            np.zeros(arrays.mask.shape, arrays.rollout_logp.dtype) for _ in range(2)
        )
        ref_logp = None if self.reference is None else np.zeros_like(old_logp)
        scored = Scored(arrays, self.routes_on_mesh(routes), old_logp, old_entropy, ref_logp)
        if self.algorithm.needs_advantage:
            scored.idle = np.concatenate([self._without_gradient(scored, x) for x in self.updates])
        return scored

    def _without_gradient(self, scored: Scored, rows: slice) -> np.ndarray:
        """Returns which rows of an update have no gradient: no token has an advantage, or their
        reward is unknown.
        """
        prepared, _ = self.prepare(scored, rows)
        is_filled = scored.arrays.lengths[rows] > 0
        idle = is_filled & ~np.any(prepared.mask & (prepared.advantage != 0), axis=1)
        # Some idle rows fill the last micro-batch with a gradient, which would otherwise be padded
        # or have another shape to compile. If no row has a gradient, they form a whole micro-batch,
        # so that the optimiser takes its step.
        trained, full = int(np.sum(is_filled & ~idle)), self._rows_of(self.rows_multiple)
        spare = -trained % full if trained else full
        idle[np.flatnonzero(idle)[:spare]] = False
        return idle

    def _unread(self, scored: Scored, traced: Sequence[int] | np.ndarray) -> np.ndarray | None:
        """Returns which idle rows need no scores, None for none: all but those that are traced and
        a micro-batch of them, evenly spaced, from which the metrics are estimated.
        """
        if scored.idle is None or self._reads_idle:
            return None
        idle, most = np.flatnonzero(scored.idle), self._rows_of(1)  # on any mesh the same rows
        skipped = scored.idle.copy()
        skipped[idle[np.arange(most) * len(idle) // most] if len(idle) > most else idle] = False
        skipped[np.asarray(traced, np.int64)] = False
        return skipped

    def _score_rows(
        self, scored: Scored, updates: Sequence[slice], stopped: Callable[[], bool]
    ) -> list[Diagnostics]:
        """Scores the rows of some updates; returns the router's diagnostics. For R2 the routes
        become those of this pass.
        """
        parts: list[Diagnostics] = []
        micros = [micro for rows in updates for micro in self._all(scored, rows)]
        self._score_micros(scored, micros, stopped, parts)
        return parts

    def _score_micros(
        self,
        scored: Scored,
        micros: Sequence[MicroBatch],
        stopped: Callable[[], bool],
        parts: list[Diagnostics],
    ) -> None:
        """Scores micro-batches; appends the router's diagnostics to `parts`."""
        for micro in stoppable(stopped, micros, parts):
            inputs = self._sequences(scored.arrays, micro, scored.routes)
            logp, entropy, used_routes, diagnostics = self._score(self.params, inputs)
            self._keep(scored, micro, inputs, logp, entropy)
            if self._replay == "R2":
                # This pass replays no routes, so its replay metrics have no meaning.
                assert scored.routes is not None
                scored.routes = record_routes(scored.routes, micro, used_routes)
                diagnostics = {
                    k: value for k, value in diagnostics.items() if not k.startswith("replay/")
                }
            parts.append(diagnostics)
            self._advance(parts)

    def _keep(self, scored: Scored, micro: MicroBatch, inputs: Sequences, logp, entropy) -> None:
        """Stores a micro-batch's scores, and computes the reference's."""
        put_rows(scored.old_logp, micro, logp)
        put_rows(scored.old_entropy, micro, entropy)
        if scored.ref_logp is not None:
            # The recorded routes are choices of the trained policy; the reference routes live.
            live = inputs._replace(routes=None)
            put_rows(scored.ref_logp, micro, self._score(self.reference, live)[0])

    def _account(self, scored: Scored, parts: Sequence[Diagnostics]) -> None:
        """Completes a scored rollout's diagnostics."""
        micros = [micro for rows in self.updates for micro in self._all(scored, rows)]
        account = score_account(scored, micros)
        if scored.idle is not None:
            tokens = scored.arrays.lengths.astype(np.float32)
            idle = np.sum(tokens, where=scored.idle)
            account["train/idle_frac"] = (jnp.asarray(idle), jnp.asarray(np.sum(tokens)))
        scored.diagnostics = merge_diagnostics([*parts, account])

    def _score_and_differentiate(
        self,
        scored: Scored,
        rows: slice,
        parts: list[Diagnostics],
        stopped: Callable[[], bool],
    ) -> tuple[Tree, Diagnostics] | None:
        """Scores the rows of the first update and computes its gradient from the same forward
        passes; appends the router's diagnostics to `parts`. Returns what `_differentiate` does for
        scored rows, bit for bit.

        Each micro-batch is prepared while the scores of later ones are 0. A response's advantages
        and weights depend on the scores of that response alone, unless some are not finite, or an
        objective of the user's combines responses: None, and the gradient is computed again. Idle
        rows come first, so that all others see their scores.
        """
        self._score_micros(scored, self._idle(scored, rows), stopped, parts)
        total, batches, tokens = None, [], set()
        diagnostics: list[Diagnostics] = []
        for micro in stoppable(stopped, self._trained(scored, rows), diagnostics):
            inputs = self._sequences(scored.arrays, micro, scored.routes)
            (logp, entropy, _, aux), pullback = step.forward_and_pullback(
                self.model,
                self.params,
                *inputs[:3],
                self.config.rollout.temperature,
                inputs.segments,
                inputs.predicted,
            )
            self._keep(scored, micro, inputs, logp, entropy)
            prepared, _ = self.prepare(scored, rows)
            batch = update_batch(scored, micro, inputs, prepared, rows.start)
            tokens.add(int(prepared.mask.sum()))
            grads, part = step.backward(
                self.model,
                self.params,
                logp,
                aux,
                pullback,
                batch,
                _share(batch, prepared),
                self.algorithm.objective,
            )
            total = step.add(total, grads)
            del grads, pullback  # frees their memory before the next forward and backward
            # Without routes, which the comparison below does not read: their memory is freed.
            batches.append((micro, inputs._replace(routes=None), batch._replace(routes=None)))
            diagnostics.append(part)
            parts.append(step.router_diagnostics(aux))
            self._advance(diagnostics)
        # The load-balancing loss is scaled by a micro-batch's share of these tokens, so every
        # micro-batch must have seen the same number.
        if len(tokens) == 1 and all(
            same_numbers(batch, update_batch(scored, micro, inputs, prepared, rows.start))
            for micro, inputs, batch in batches
        ):
            return total, merge_diagnostics(diagnostics)
        finite = np.isfinite(scored.old_logp).all() and np.isfinite(scored.old_entropy).all()
        # If all scores are finite, the objective combines responses and would do so in every step.
        self._one_pass = not finite
        return None

    def _differentiate(
        self, scored: Scored, rows: slice, prepared: Prepared, stopped=never_stop, trace=None
    ) -> tuple[Tree, Diagnostics]:
        """Computes the gradient of one update of scored rows, and its diagnostics."""
        total = None
        parts: list[Diagnostics] = []
        # Those of `batches`, in the same order, for the trace.
        micros = iter(self._trained(scored, rows))
        for batch in stoppable(stopped, self.batches(scored, rows, prepared), parts):
            grads, diagnostics, logp = step.gradients(
                self.model,
                self.params,
                batch,
                _share(batch, prepared),
                objective=self.algorithm.objective,
                temperature=self.config.rollout.temperature,
            )
            total = step.add(total, grads)
            del grads  # frees their memory before the next forward and backward
            parts.append(diagnostics)
            self._advance(parts)
            if trace is not None:
                trace.update(next(micros), logp)
        return total, merge_diagnostics(parts)

    def _take(self, grads: Tree) -> dict:
        """Takes an optimiser step, which replaces `state`; returns the optimiser's metrics."""
        self.state, applied = step.apply(
            self.state,
            grads,
            config=self.update_settings.optim,
            total_steps=self.update_settings.total_updates,
            decays=trained.decay_mask(self.config.lora, self.model, self.state.params),
        )
        # No-op unless XLA changed a sharding.
        self.state = self._on_mesh(self.state)
        optim.check_divergence(
            int(self.state.bad_steps), self.update_settings.optim.max_bad_steps, self.directory
        )
        return applied

    def _advance(self, parts: Sequence[Tree]) -> None:
        """Counts a finished micro-batch and reports progress. It waits for all but the newest,
        since queued work is not done.
        """
        self._done += 1
        if self.progress is not None:
            jax.block_until_ready(parts[-2:-1])
            self.progress(self._done, max(self._done, self._planned))

    def _metrics(
        self, parts: list[Diagnostics], optimizer_metrics: list[dict], accounts: list[Diagnostics]
    ) -> dict[str, float]:
        """Returns metrics averaged over the updates: `parts` and `optimizer_metrics` have one entry
        per update, `accounts` belong to all.
        """
        total = fetch(finalize_diagnostics(merge_diagnostics([*parts, *accounts])))
        metrics = {name: float(value) for name, value in total.items()}
        metrics["loss"] /= len(parts)  # a sum; the other diagnostics are ratios of sums
        for name in optimizer_metrics[0]:
            metrics[name] = float(np.mean([float(one[name]) for one in optimizer_metrics]))
        return {**metrics, "skipped_updates": float(self.state.skipped)}

    def _score(self, params: Tree, inputs: Sequences):
        return step.score(self.model, params, *inputs, temperature=self.config.rollout.temperature)

    def _rows_of(self, multiple: int) -> int:
        """Returns the rows of a full micro-batch of the longest ones, a multiple of `multiple`."""
        updates = self.update_settings
        return row_counts(updates.longest_row, updates.micro_batch_tokens, multiple)[0]

    @property
    def rows_multiple(self) -> int:
        """The number that a micro-batch's rows must be a multiple of."""
        return 1 if self.model.placement is None else self.model.placement.rows_multiple

    def _all(self, scored: Scored, rows: slice) -> list[MicroBatch]:
        """Returns the micro-batches of one update that are scored."""
        return [*self._trained(scored, rows), *self._idle(scored, rows)]

    def _trained(self, scored: Scored, rows: slice) -> list[MicroBatch]:
        """Returns the micro-batches of one update that have a gradient."""
        return self._plan(scored.arrays, rows, None if scored.idle is None else ~scored.idle)

    def _idle(self, scored: Scored, rows: slice) -> list[MicroBatch]:
        """Returns the micro-batches of the update's rows without a gradient that are scored."""
        if scored.idle is None:
            return []
        chosen = scored.idle if scored.skipped is None else scored.idle & ~scored.skipped
        return self._plan(scored.arrays, rows, chosen)

    def _plan(
        self, arrays: StepArrays, rows: slice, chosen: np.ndarray | None = None
    ) -> list[MicroBatch]:
        """Returns the micro-batches of the chosen rows of one update, without the empty rows of
        groups that did not grow.
        """
        is_filled = arrays.lengths[rows] > 0
        if chosen is not None:
            is_filled &= chosen[rows]
        filled = rows.start + np.flatnonzero(is_filled)
        micros = plan(
            arrays.lengths[filled],
            self.update_settings.buckets,
            self.update_settings.micro_batch_tokens,
            rows_multiple=self.rows_multiple,
            packed_row_tokens=self.update_settings.packed_row_tokens,
        )
        return [
            micro._replace(rows=np.where(micro.rows < 0, -1, filled[micro.rows]))
            for micro in micros
        ]

    def _sequences(self, arrays: StepArrays, micro: MicroBatch, routes) -> Sequences:
        """Returns `sequences` with the routes on the devices of their rows: scoring and updates
        then run one program, whatever the routes' sharding was.
        """
        inputs, placement = sequences(arrays, micro, routes), self.model.placement
        if placement is None or inputs.routes is None:
            return inputs
        spec = placement.spec(inputs.routes.shape, ("batch", "tokens", None, None))
        return inputs._replace(routes=move(inputs.routes, placement.sharding(*spec)))

    def _on_mesh(self, tree: Tree) -> Tree:
        """Moves parameters, or a state that contains them, to the mesh's storage layout."""
        return place(tree, self.model.config, self.model.placement)

    def routes_on_mesh(self, routes: Tree) -> Tree:
        """Moves routes to the training devices; routes of other devices may pass through
        the host.
        """
        placement = self.model.placement
        if placement is None or routes is None:
            return routes
        return move(routes, placement.rows(routes.shape[0]))

    def _mfu(self, lengths: np.ndarray, seconds: float) -> dict[str, float]:
        """Returns train/mfu: the operations of forward and backward of these rows, which have a
        gradient, over the devices' peak; passes for old log-probs count as overhead.

        Empty on a chip whose peak is unknown (compass_jax/chips.py).
        """
        chip = chip_of(jax.devices()[0].device_kind)
        if chip is None:
            return {}
        devices = 1 if self.model.placement is None else self.model.placement.mesh.size
        # A backward pass has twice the operations of a forward pass.
        flops = 3 * self.update_settings.epochs * forward_flops(self.model.config, lengths)
        return {"train/mfu": flops / (seconds * devices * chip.device_flops)}


def _share(batch: step.UpdateBatch, prepared: Prepared) -> Array:
    """Returns the micro-batch's share of the update's tokens."""
    return jnp.float32(batch.mask.sum() / max(int(prepared.mask.sum()), 1))
