"""The learner: scores a rollout at the parameters before its first update, then updates them. It
takes arrays only, without prompts, files or engine, so other programs can use it as a library:

    model = Transformer(config.model, config.compute)
    learner = Learner.start(LearnerConfig(), model, init_params(config.model, config.compute, key))
    for arrays in rollouts:  # records.StepArrays from any sampler
        scored = learner.score(arrays)
        for rows in learner.updates:
            metrics = learner.update(scored, rows)
    learner.params

`Learner.train` does the same for a whole rollout, with a forward pass less: the first update's rows
get their old log-probs from the pass of its gradient. To score is to compute log-probs and
entropies. Scores and gradients use micro-batches of the same rows, since a row's numbers depend on
the shape in which it is computed. Idle rows have no gradient, since none of their tokens has an
advantage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.base.aliases import Tree
from compass_jax.base.programs import Program, struct
from compass_jax.base.records import StepArrays, TrainState
from compass_jax.config import LearnerConfig
from compass_jax.devices.sharding import move
from compass_jax.model.moe import empty_routes
from compass_jax.model.params import place
from compass_jax.model.transformer import Transformer
from compass_jax.rl.diagnostics import Diagnostics, merge_diagnostics
from compass_jax.rl.prepare import Prepared
from compass_jax.rl.row_plan import row_plan
from compass_jax.training import optim, step, trained
from compass_jax.training.passes import Gradient, Passes
from compass_jax.training.programs import training_programs
from compass_jax.training.scored import Scored, score_account
from compass_jax.training.stops import never_stop
from compass_jax.training.trace import TokenTrace
from compass_jax.training.update_metrics import mfu, update_metrics

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
        self.capacity, self.groups = config.sampling.capacity, config.sampling.prompts_per_step
        self.state: TrainState = self._on_mesh(state)
        self.reference, self.frozen = self._on_mesh(reference), self._on_mesh(frozen)
        if config.algorithm.uses_reference and frozen is not None:
            self.reference = self.frozen
        # called after each micro-batch of `train` with (done, total), those of the pass for old
        # log-probs and of every epoch counted
        self.progress: Callable[[int, int], None] | None = None
        # means of each response `[b]` in the rollout that `train` was last given
        self.advantage, self.entropy = np.zeros(0), np.zeros(0)
        # Controls, of which other values compile nothing again: factor of the learning rate,
        # temperature of the policy, AdamW's betas (None: those of the settings).
        self.rate, self.temperature = 1.0, config.rollout.temperature
        self.betas: tuple[float, float] | None = None
        self._replay = config.algorithm.replay if model.config.moe_layers else "off"
        combines = config.algorithm.objective.combines_responses
        # R2 replays routes that must be recorded before the forward pass of the update
        self._fuses = self._replay != "R2" and not combines
        # Whether more than metrics depends on the scores of idle rows
        self._reads_idle = self._replay == "R2" or config.algorithm.correction.acts or combines
        self._verified = False  # whether it was verified that the objective combines no responses

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
        accounts: Sequence[Diagnostics] = (),
        stopped: Callable[[], bool] = never_stop,
        trace: TokenTrace | None = None,
    ) -> dict[str, float]:
        """Trains on a whole rollout: scores it, then runs every update of every epoch. Returns the
        metrics.

        Args:
            accounts: diagnostics of samples that are not in `arrays`.
            stopped: whether to stop; called before each micro-batch until the first update.
            trace: filled in with the numbers of its rows' tokens.

        Raises:
            TrainingDiverged: `rl.optim.max_bad_steps` consecutive updates had no finite gradient.
            TrainingStopped: `stopped()` was true before the first update; nothing has changed.
        """
        started, epochs = time.perf_counter(), self.update_settings.epochs
        scored, parts = self._unscored(arrays, () if trace is None else trace.rows), list[Tree]()
        plan, passes = scored.plan, self._passes(scored, stopped)
        passes.score(plan.scored_first, parts)
        scored_s = time.perf_counter() - started
        gradient = self._first_gradient(passes, parts) if plan.fused else None
        accounts = [merge_diagnostics([*parts, self._account(scored)]), *accounts]
        # Advantages depend on the old policy only, so those of later updates are known by now.
        prepared = [(update, *self.prepare(scored, update.rows)) for update in plan.updates]
        self.advantage = np.concatenate([x.of_responses() for _, x, _ in prepared])
        self.entropy = scored.entropy_of_responses()
        if trace is not None:
            trace.begin(scored, [(update.rows, x) for update, x, _ in prepared])
        # The first update begins at the scored policy, where every ratio is 1: nothing to trace.
        ratio_trace = trace if epochs * len(prepared) > 1 else None
        updates, applied = list[Diagnostics](), list[dict]()
        for update, prepared_rows, _ in prepared * epochs:
            passes.params = self.params
            grads, diagnostics = gradient or passes.differentiate(
                update, prepared_rows, ratio_trace
            )
            gradient = None
            updates.append(diagnostics)
            applied.append(self.apply(grads))
            del grads  # frees the gradient's memory before the next update
            # After an update a stop waits for the others: no checkpoint holds half a step.
            passes.stopped = never_stop
        if ratio_trace is not None:
            ratio_trace.finish(self.algorithm.objective, self.model.columns)
        accounts += [account for _, _, account in prepared]
        seconds = time.perf_counter() - started
        return {
            **update_metrics(updates, applied, accounts),
            "skipped_updates": float(self.state.skipped),
            "time/score_s": scored_s,
            "time/update_s": seconds - scored_s,
            "train/tokens_per_s": int(arrays.lengths.sum()) / seconds,
            **mfu(self.model, arrays.lengths[~plan.idle], epochs, seconds),
        }

    def score(self, arrays: StepArrays, stopped: Callable[[], bool] = never_stop) -> Scored:
        """Computes old log-probs and entropies of every row, the reference's log-probs, and the
        routes that the updates replay: the rollout's (R3), those of this pass (R2) or none (off).
        Stops like `train`.
        """
        scored, parts = self._unscored(arrays, every=True), list[Diagnostics]()
        passes = self._passes(scored, stopped)
        passes.score(scored.plan.scored, parts)
        scored.diagnostics = merge_diagnostics([*parts, self._account(scored)])
        return scored

    def prepare(self, scored: Scored, rows: slice) -> tuple[Prepared, Diagnostics]:
        """Computes advantages and weights of one update's rows (rl/prepare.py), and the account of
        its tokens; returns them on the host. Raises ValueError where `rows` are not whole groups.
        """
        return self._passes(scored).prepare(rows)

    def gradient(self, scored: Scored, rows: slice, prepared: Prepared) -> Gradient:
        """Computes the gradient of one update of a scored rollout, summed over its micro-batches,
        and its diagnostics. `prepared` may be any advantages and weights of its rows.
        """
        return self._passes(scored).differentiate(scored.update_of(rows), prepared)

    def apply(self, grads: Tree) -> dict:
        """Takes an optimiser step, which replaces `state`; returns the optimiser's metrics. Raises
        TrainingDiverged like `train`.
        """
        self.state, applied = step.apply(
            self.state,
            grads,
            config=self.update_settings.optim,
            total_steps=self.update_settings.total_updates,
            decays=trained.decay_mask(self.config.lora, self.model, self.state.params),
            factor=jnp.float32(self.rate),
            betas=self.betas,
        )
        # No-op unless XLA changed a sharding.
        self.state = self._on_mesh(self.state)
        optim.check_divergence(
            int(self.state.bad_steps), self.update_settings.optim.max_bad_steps, self.directory
        )
        return applied

    def update(self, scored: Scored, rows: slice) -> dict[str, float]:
        """Runs one optimiser step on `rows` of a scored rollout: advantages and weights, gradients
        summed over micro-batches, apply. Returns the metrics; `state` is replaced.

        Raises TrainingDiverged like `train`, and ValueError where `rows` are not whole groups.
        """
        prepared, account = self.prepare(scored, rows)
        grads, diagnostics = self.gradient(scored, rows, prepared)
        metrics = update_metrics([diagnostics], [self.apply(grads)], [account])
        return {**metrics, "skipped_updates": float(self.state.skipped)}

    def routes_on_mesh(self, routes: Tree) -> Tree:
        """Moves routes to the training devices; routes of other devices may pass through
        the host.
        """
        placement = self.model.placement
        if placement is None or routes is None:
            return routes
        return move(routes, placement.rows(routes.shape[0]))

    # ---- parts -----------------------------------------------------------------------------------

    def _unscored(
        self,
        arrays: StepArrays,
        traced: Sequence[int] | np.ndarray = (),
        *,
        every: bool = False,
    ) -> Scored:
        """Returns a rollout whose log-probs and entropies are 0 until its rows are scored (all of
        them, where `every`), with the routes that the forward passes take.
        """
        routes, placement = None, self.model.placement
        if self._replay == "R2":
            # Unset rows: each token chooses its experts live, in the program that the updates use.
            shape = len(arrays.lengths), self.config.rollout.max_length
            routes = empty_routes(self.model.config, *shape)
        elif self._replay == "R3":
            routes = arrays.routes
        old_logp, old_entropy = (
            np.zeros(arrays.mask.shape, arrays.rollout_logp.dtype) for _ in range(2)
        )
        ref_logp = None if self.reference is None else np.zeros_like(old_logp)
        can_skip = self.algorithm.zero_advantage_is_idle
        plan = partial(
            row_plan,
            arrays.lengths,
            updates=self.updates,
            config=self.update_settings,
            rows_multiple=1 if placement is None else placement.rows_multiple,
            reads_idle=every or self._reads_idle or not can_skip,
            fused=self._fuses and not every,
            traced=traced,
        )
        scored = Scored(
            arrays,
            self.routes_on_mesh(routes),
            old_logp,
            old_entropy,
            ref_logp,
            plan(np.zeros(len(arrays.lengths), bool)),
        )
        if can_skip:
            # By rewards alone: the entropies are still 0, and RL-ZVP, which reads them, is off.
            prepared = [self.prepare(scored, rows)[0] for rows in self.updates]
            scored.plan = plan(np.concatenate([x.without_gradient() for x in prepared]))
        return scored

    def _passes(self, scored: Scored, stopped: Callable[[], bool] = never_stop) -> Passes:
        planned = scored.plan.passes(self.update_settings.epochs)
        policies = self.params, self.reference, self.temperature
        return Passes(self.config, self.model, scored, *policies, stopped, self.progress, planned)

    def _account(self, scored: Scored) -> Diagnostics:
        return score_account(scored, counts_idle=self.algorithm.zero_advantage_is_idle)

    def _first_gradient(self, passes: Passes, parts: list[Diagnostics]) -> Gradient | None:
        """Scores the rows of the first update with its gradient, once the idle ones are scored.
        None where some scores are not finite: the gradient must be computed again.
        """
        gradient = passes.score_and_differentiate(
            passes.scored.plan.updates[0], parts, compares=not self._verified
        )
        self._verified = self._verified or gradient is not None
        return gradient

    def _on_mesh(self, tree: Tree) -> Tree:
        """Moves parameters, or a state that contains them, to the mesh's storage layout."""
        return place(tree, self.model.config, self.model.placement)
