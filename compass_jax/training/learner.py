"""The learner: scores a rollout at the parameters before its first update, then updates them. It
takes arrays only, without prompts, files or engine, so it is a library of its own:

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
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt

from compass_jax.aliases import Tree
from compass_jax.chips import chip_of
from compass_jax.config import LearnerConfig
from compass_jax.model.flops import forward_flops
from compass_jax.model.moe import empty_routes
from compass_jax.model.params import place
from compass_jax.model.routes import put_routes, take_routes
from compass_jax.model.transformer import Transformer
from compass_jax.programs import Program, struct
from compass_jax.records import StepArrays, TrainState
from compass_jax.rl.bucketing import MicroBatch, padding_frac, plan, take_rows
from compass_jax.rl.correction import mismatch
from compass_jax.rl.diagnostics import Diagnostics, finalize_diagnostics, merge_diagnostics
from compass_jax.rl.prepare import Prepared
from compass_jax.rl.zero_variance import waste_of_dropped
from compass_jax.sharding import fetch, move
from compass_jax.training import optim, step, trained
from compass_jax.training.programs import training_programs
from compass_jax.training.stops import never_stop, stoppable
from compass_jax.training.trace import TokenTrace

STATE = "Learner.state"  # where the weights are for a learner without a run directory


@dataclass(frozen=True)
class Scored:
    """A rollout with log-probs and entropies at the parameters before its first update."""

    arrays: StepArrays
    routes: UInt[Array, "b n l k"] | None  # replayed in the updates; None: live routing
    old_logp: np.ndarray  # float32 [b t]
    old_entropy: np.ndarray  # float32 [b t], nats
    ref_logp: np.ndarray | None  # float32 [b t], the reference's; None: no reference
    diagnostics: Diagnostics


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
    ) -> dict[str, float]:
        """Trains on a whole rollout: scores it, then runs every update of every epoch. Returns the
        metrics.

        Args:
            dropped_tokens: tokens that were generated and are not in `arrays`; they are counted as
                waste.
            stopped: whether to stop; called before each micro-batch until the first update.
            trace: filled in with the numbers of its rows' tokens.

        Raises:
            TrainingDiverged: `rl.optim.max_bad_steps` consecutive updates had no finite gradient.
            TrainingStopped: `stopped()` was true before the first update; nothing has changed.
        """
        started = time.perf_counter()
        planned = sum(len(self._plan(arrays, rows)) for rows in self.updates)
        self._done, self._planned = 0, planned * (1 + self.update_settings.epochs)
        scored = self.score(arrays, stopped)
        scored_s = time.perf_counter() - started
        prepared = [(rows, *self.prepare(scored, rows)) for rows in self.updates]
        self.advantage = np.concatenate([x.of_responses() for _, x, _ in prepared])
        parts: list[Diagnostics] = []
        optimizer_metrics: list[dict] = []
        if trace is not None:
            trace.begin(scored, [(rows, x) for rows, x, _ in prepared])
        # The first update begins at the scored policy, where every ratio is 1: nothing to trace.
        ratios = trace if self.update_settings.epochs * len(prepared) > 1 else None
        for _ in range(self.update_settings.epochs):
            for rows, prepared_rows, _ in prepared:
                # After an update a stop waits for the others: no checkpoint holds half a step.
                should_stop = never_stop if optimizer_metrics else stopped
                diagnostics, applied = self._apply(scored, rows, prepared_rows, should_stop, ratios)
                parts.append(diagnostics)
                optimizer_metrics.append(applied)
        if ratios is not None:
            ratios.finish(self.algorithm.objective, self.model.columns)
        accounts = [
            scored.diagnostics,
            waste_of_dropped(dropped_tokens),
            *(account for _, _, account in prepared),
        ]
        metrics = self._metrics(parts, optimizer_metrics, accounts)
        seconds, tokens = time.perf_counter() - started, int(arrays.lengths.sum())
        metrics |= {
            "time/score_s": scored_s,
            "time/update_s": seconds - scored_s,
            "train/tokens_per_s": tokens / seconds,
        }
        return metrics | self._mfu(arrays.lengths, seconds)

    def score(self, arrays: StepArrays, stopped: Callable[[], bool] = never_stop) -> Scored:
        """Computes old log-probs and entropies of every row, the reference's log-probs, and the
        routes that the updates replay: the rollout's (R3), those of this pass (R2) or none (off).
        Stops like `train`.
        """
        mode = self.algorithm.replay if self.model.config.moe_layers else "off"
        routes = None if mode == "off" else self.routes_on_mesh(arrays.routes)
        if mode == "R2":
            # Unset rows: each token chooses its experts live, in the program that the updates use.
            routes = self.routes_on_mesh(
                empty_routes(self.model.config, len(arrays.lengths), self.config.rollout.max_length)
            )
        shape = arrays.mask.shape
        parts: list[Diagnostics] = []
        old_logp, old_entropy = (np.zeros(shape, arrays.rollout_logp.dtype) for _ in range(2))
        ref_logp = None if self.reference is None else np.zeros_like(old_logp)
        micros = [micro for rows in self.updates for micro in self._plan(arrays, rows)]
        for micro in stoppable(stopped, micros, parts):
            tokens, lengths, micro_routes = self._sequences(arrays, micro, routes)
            logp, entropy, used_routes, diagnostics = self._score(
                self.params, tokens, lengths, micro_routes
            )
            put_rows(old_logp, micro, logp)
            put_rows(old_entropy, micro, entropy)
            if mode == "R2":
                assert routes is not None
                routes = put_routes(routes, device_rows(micro, routes), used_routes)
                diagnostics = {
                    k: value for k, value in diagnostics.items() if not k.startswith("replay/")
                }
            if ref_logp is not None:
                put_rows(ref_logp, micro, self._score(self.reference, tokens, lengths, None)[0])
            parts.append(diagnostics)
            self._advance(parts)
        parts.append(score_account(arrays, old_logp, old_entropy, micros))
        return Scored(arrays, routes, old_logp, old_entropy, ref_logp, merge_diagnostics(parts))

    def update(self, scored: Scored, rows: slice) -> dict[str, float]:
        """Runs one optimiser step on `rows` of a scored rollout: advantages and weights, gradients
        summed over micro-batches, apply. Returns the metrics; `state` is replaced.

        Raises TrainingDiverged like `train`, and ValueError where `rows` are not whole groups.
        """
        prepared, account = self.prepare(scored, rows)
        diagnostics, applied = self._apply(scored, rows, prepared)
        return self._metrics([diagnostics], [applied], [account])

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
        )
        return jax.device_get(prepared), account

    def batches(
        self, scored: Scored, rows: slice, prepared: Prepared
    ) -> Iterator[step.UpdateBatch]:
        """Yields the micro-batches of one update while they are transferred to the devices."""
        for micro in self._plan(scored.arrays, rows):
            sequences = self._sequences(scored.arrays, micro, scored.routes)
            yield update_batch(scored, micro, sequences, prepared, rows.start)

    # ---- parts -----------------------------------------------------------------------------------

    def _apply(
        self, scored: Scored, rows: slice, prepared: Prepared, stopped=never_stop, trace=None
    ):
        """Runs one update and replaces `state`. Returns its diagnostics and the optimiser's
        metrics.
        """
        tokens, total = max(int(prepared.mask.sum()), 1), None
        parts: list[Diagnostics] = []
        micros = iter(self._plan(scored.arrays, rows))
        for batch in stoppable(stopped, self.batches(scored, rows, prepared), parts):
            grads, diagnostics, logp = step.gradients(
                self.model,
                self.params,
                batch,
                jnp.float32(batch.mask.sum() / tokens),
                objective=self.algorithm.objective,
                temperature=self.config.rollout.temperature,
            )
            total = step.add(total, grads)
            del grads  # frees their memory before the next forward and backward
            parts.append(diagnostics)
            self._advance(parts)
            if trace is not None:
                trace.update(next(micros), logp)
        self.state, applied = step.apply(
            self.state,
            total,
            config=self.update_settings.optim,
            total_steps=self.update_settings.total_updates,
            decays=trained.decay_mask(self.config.lora, self.model, self.state.params),
        )
        # No-op unless XLA changed a sharding.
        self.state = self._on_mesh(self.state)
        optim.check_divergence(
            int(self.state.bad_steps), self.update_settings.optim.max_bad_steps, self.directory
        )
        return merge_diagnostics(parts), applied

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

    def _score(self, params: Tree, tokens, lengths, routes):
        return step.score(
            self.model, params, tokens, lengths, routes, temperature=self.config.rollout.temperature
        )

    def _plan(self, arrays: StepArrays, rows: slice) -> list[MicroBatch]:
        """Returns the micro-batches of one update, without the empty rows of groups that did not
        grow.
        """
        filled = rows.start + np.flatnonzero(arrays.lengths[rows])
        multiple = 1 if self.model.placement is None else self.model.placement.rows_multiple
        micros = plan(
            arrays.lengths[filled],
            self.update_settings.buckets,
            self.update_settings.micro_batch_tokens,
            rows_multiple=multiple,
        )
        return [
            micro._replace(rows=np.where(micro.rows < 0, -1, filled[micro.rows]))
            for micro in micros
        ]

    def _sequences(self, arrays: StepArrays, micro: MicroBatch, routes):
        """Returns `sequences` with the routes on the devices of their rows: scoring and updates
        then run one program, whatever the routes' sharding was.
        """
        tokens, lengths, routes = sequences(arrays, micro, routes)
        placement = self.model.placement
        if placement is not None and routes is not None:
            spec = placement.spec(routes.shape, ("batch", "tokens", None, None))
            routes = move(routes, placement.sharding(*spec))
        return tokens, lengths, routes

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
        """Returns train/mfu: the operations of forward and backward of these rows over the devices'
        peak; the pass for old log-probs counts as overhead.

        Empty on a chip whose peak is unknown (compass_jax/chips.py).
        """
        chip = chip_of(jax.devices()[0].device_kind)
        if chip is None:
            return {}
        devices = 1 if self.model.placement is None else self.model.placement.mesh.size
        flops = 3 * self.update_settings.epochs * forward_flops(self.model.config, lengths)
        return {"train/mfu": flops / (seconds * devices * chip.device_flops)}


def device_rows(micro: MicroBatch, routes: Array) -> Array:
    """Returns the micro-batch's rows of `routes`; padding rows point past their end."""
    return jnp.asarray(np.where(micro.rows < 0, routes.shape[0], micro.rows).astype(np.int32))


def sequences(arrays: StepArrays, micro: MicroBatch, routes: Array | None):
    """Returns (tokens, lengths, routes) of a micro-batch, from the routes of all rows
    (None: live).
    """
    tokens, lengths = (
        take_rows(x, micro.rows, micro.length) for x in (arrays.tokens, arrays.lengths)
    )
    if routes is None:
        return tokens, lengths, None
    return tokens, lengths, take_routes(routes, device_rows(micro, routes), micro.length)


def update_batch(
    scored: Scored, micro: MicroBatch, inputs: tuple, prepared: Prepared, offset: int
) -> step.UpdateBatch:
    """Returns one micro-batch of an update. `inputs` are its `sequences`; `prepared` has the
    update's rows, which start at row `offset` of the rollout.
    """

    def take(x, rows):
        return None if x is None else take_rows(x, rows, micro.length)

    local = np.where(micro.rows < 0, -1, micro.rows - offset)
    tokens, lengths, routes = inputs
    return step.UpdateBatch(
        tokens,
        lengths,
        routes,
        mask=take(prepared.mask, local),
        old_logp=take(scored.old_logp, micro.rows),
        old_entropy=take(scored.old_entropy, micro.rows),
        ref_logp=take(scored.ref_logp, micro.rows),
        advantage=take(prepared.advantage, local),
        weight=take(prepared.weight, local),
        entropy_group=take(prepared.entropy_group, local),
        kl_weight=take(prepared.kl_weight, local),
    )


def put_rows(target: np.ndarray, micro: MicroBatch, values: Array) -> None:
    """Writes a micro-batch's values `[m n]` to their rows of `target`; padding rows are dropped."""
    real = micro.rows >= 0
    length = min(target.shape[1], micro.length)
    target[micro.rows[real], :length] = fetch(values)[real, :length]


def score_account(
    arrays: StepArrays, old_logp: np.ndarray, old_entropy: np.ndarray, micros: Sequence[MicroBatch]
) -> Diagnostics:
    """Returns the mismatch to the sampler, the mean entropy and the padding of a scored rollout.
    Rows sampled at another temperature have a separate mismatch, since they differ from training by
    intent and would hide a fault of the others.
    """
    hotter = np.zeros_like(arrays.mask)
    if arrays.hotter is not None:
        hotter = arrays.mask & arrays.hotter[:, None]
    logp = jnp.asarray(old_logp), jnp.asarray(arrays.rollout_logp)
    gap = mismatch(*logp, jnp.asarray(arrays.mask & ~hotter))
    if hotter.any():
        hotter_gap = mismatch(*logp, jnp.asarray(hotter))
        gap |= {f"mismatch/hotter/{name.split('/')[1]}": x for name, x in hotter_gap.items()}
    entropy = np.float32(np.sum(old_entropy, where=arrays.mask))
    tokens = np.float32(max(arrays.mask.sum(), 1))
    return gap | {
        "entropy_nats": (jnp.asarray(entropy), jnp.asarray(tokens)),
        "padding_frac": (jnp.float32(padding_frac(micros, arrays.lengths)), jnp.float32(1)),
    }
