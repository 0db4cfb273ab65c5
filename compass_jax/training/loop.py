"""The RL loop: prompts -> rollout (scored as samples finish) -> old log-probs -> updates -> weight
sync -> checkpoint.

A group is all samples of one prompt: `group_size` of them, or more after growth. A step policy
(experience/step_policies/) decides which groups a step trains on and which samples are still
missing. Routes are the experts that a router chose for each token.

One step:
 1. collect: draw the next prompts and sample their groups under the synced weights, while verifiers
    score finished samples
 2. old log-probs: one pass of the training model at the step's first parameters fixes log-probs and
    entropies. Routes are replayed so that old and new log-probs are of the same experts: those of
    the rollout (R3), or those of this pass in the updates (R2). The rows of the first update take
    theirs from its own forward pass
 3. update: prepare (advantages, weights over the whole update), gradients summed over
    micro-batches, apply
 4. sync the weights to the rollout
 5. log; save

With `rl.partial_prompts`, collecting ends before the longest samples are finished: they are carried
into the next step. With `rl.one_step_off`, the rollout of step n + 1 runs during the updates of
step n, with the weights from before them, and rl.correction compensates. With `rl.group_replay`,
groups of earlier steps take the places of uniform groups in an update. A step depends on the
checkpoint only, so a killed run repeats its steps exactly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import jax
import numpy as np

from compass_jax.aliases import JsonObject, Tree
from compass_jax.config import RunConfig
from compass_jax.config.curriculum import at_step, stage_at
from compass_jax.data.difficulty import label_of
from compass_jax.data.keep import kept_prompts
from compass_jax.data.prompts import (
    PromptSet,
    evaluation_sets,
    fitting,
    in_words,
    train_prompts,
)
from compass_jax.data.selectors import prompt_selector
from compass_jax.data.stream import PromptStream
from compass_jax.errors import CompassError
from compass_jax.experience.assemble import assemble, repetition
from compass_jax.experience.collect import Collector, new_buffer, results_of
from compass_jax.experience.drafts import abstract_drafts, check_turns
from compass_jax.experience.evaluate import Evaluation, Keep, evaluate, turns_of
from compass_jax.experience.history import PromptHistory
from compass_jax.experience.judged import failure_of
from compass_jax.experience.metrics import (
    Bins,
    group_metrics,
    label_inversion,
    label_metrics,
    permute_rewards,
    staleness,
    step_histograms,
)
from compass_jax.experience.replay import UpdateGroups, store_groups, update_groups
from compass_jax.machine import peak_bytes, return_freed_memory
from compass_jax.memory import check_drafts, check_kept_groups, memory_line
from compass_jax.model.params import in_layout, placed_structs, stack, training_layout
from compass_jax.model.transformer import Transformer
from compass_jax.records import Group, Prompt, StepArrays
from compass_jax.rewards.faults import VerifierError
from compass_jax.rewards.joined import AnyScorer, check_rows
from compass_jax.rollout.engine import Engine
from compass_jax.runs.screen import EVALUATION_PHASE
from compass_jax.runs.telemetry import Telemetry
from compass_jax.samplers.pool import Pool
from compass_jax.samplers.remote import RemoteEngine
from compass_jax.session import (
    StopSignal,
    load_tokenizer,
    newest_checkpoint,
)
from compass_jax.sharding import Placement, placements
from compass_jax.training import optim, trained
from compass_jax.training.ahead import CompileAhead
from compass_jax.training.callbacks import Callbacks
from compass_jax.training.guard import Guard
from compass_jax.training.header import header, rl_method
from compass_jax.training.learner import Learner
from compass_jax.training.notices import Notices
from compass_jax.training.own_judge import PolicyJudge
from compass_jax.training.samples import SampleLog
from compass_jax.training.stops import TrainingStopped
from compass_jax.training.trace import TokenTrace
from compass_jax.weights import checkpoint
from compass_jax.weights.adapters import adapter_meta, check_base
from compass_jax.weights.checkpoint import Checkpoints
from compass_jax.weights.recorded import check_recorded_routes
from compass_jax.weights.start import VOCAB_ROWS, first_parameters, vocab_rows
from compass_jax.weights.sync import sync_weights

MAX_LABELS = 32  # with separate metrics; more would hide the others


class StepFailed(CompassError, RuntimeError):
    """Every sample of a step failed; the message has the reason."""


class RLTrainer:
    """One stage of a run with its learner, engine, prompts and buffer. `steps()` yields each step's
    metrics; `save()` writes a checkpoint.
    """

    learner: Learner
    decode: Tree  # the rollout's weights

    def __init__(
        self,
        config: RunConfig,
        scorer: AnyScorer,
        stop: StopSignal,
        telemetry: Telemetry,
        printed: set[str] | None = None,
        pool: Pool | None = None,
    ):
        """Continues the run from its newest checkpoint, to the end of its stage
        (config/curriculum.py).

        Args:
            printed: notices that this run has printed; new ones are added.
            pool: the samplers of config.samplers.
        """
        newest = newest_checkpoint(config.directory, telemetry.note)
        self.done_steps = 0 if newest is None else newest.manifest.step
        self.stage = stage_at(config.rl, self.done_steps)
        check_drafts(config.rl)
        config = at_step(config, self.done_steps)
        check_kept_groups(config, config.rl)
        train, rollout = placements(config.mesh, config.local_rollout_mesh, config.rollout_apart)
        self.tokenizer = load_tokenizer(config)
        vocab_size = self.tokenizer.vocab_size
        self.config, self.rl = config, config.rl
        self.scorer, self.stop, self.telemetry = scorer, stop, telemetry
        guard = config.rl.guard
        self.engine = self._open_engine(rollout, pool)
        self.notices = Notices(config, telemetry.note, printed, self.done_steps)
        self.guard = Guard(
            guard,
            self.rl.steps,
            config.rewards,
            self.notices.print_of_kind,
            self.rl.zero_variance.posterior,
        )
        self.checkpoints = Checkpoints(config.directory, config.model, config.keep_checkpoints)
        if guard.action == "restore":
            # `fall_back` needs a checkpoint from before the guard's window.
            self.checkpoints.needed_step = self.guard.before_window
        self._open_prompts()
        self.history = PromptHistory()
        self.collect = Collector(
            self.engine,
            scorer,
            turns_of(self.tokenizer, config.rollout),
            self.history.expected_length,
            self.rl.sampling,
            config.rewards,
            config.seed,
            posterior=self.selector.posterior,
        )
        self.judge = PolicyJudge(config, scorer, self.engine, self.tokenizer)
        self.buffer = new_buffer(self.engine, self.rl.sampling)
        self.samples = SampleLog(
            config.log,
            self.rl.capacity,
            config.show_samples_every,
            config.rollout,
            self.tokenizer,
            telemetry,
        )
        self.callbacks = Callbacks(config.callbacks)
        self.histograms: dict[str, Bins] = {}  # of the step that was yielded last
        self.notices.at_start(len(self.stream), len(self.labels))
        # the rollout that ran during the last step's updates, with its metrics or its error
        self.ahead: Future[dict[str, float] | None] | None = None
        self._waited_s = 0.0  # for this rollout
        self.interrupted = False  # whether a stop came within a step
        layout = training_layout(config.compute)
        model = Transformer(config.model, config.compute, layout, train, vocab_size)
        self._restore_or_start(model, newest)
        self._sync_weights()

    def _open_engine(self, rollout: Placement | None, pool: Pool | None) -> Engine:
        """Returns the engine of this process's devices, or that of the samplers."""
        config = self.config
        settings = config.model, config.rollout_compute, config.rollout
        tokens = self.tokenizer.end_ids, rollout, self.tokenizer.vocab_size
        if pool is None:
            return Engine(*settings, *tokens)
        mesh = config.rollout_mesh or config.mesh
        return RemoteEngine(pool, *settings, mesh, *tokens, config.rl.drafts)

    def _open_prompts(self) -> None:
        """Reads the prompts of training and of evaluation, checks that the verifiers can judge
        their rows, and creates the stream and the selector from which steps draw.
        """
        config = self.config
        tell_once, longest = self.notices.print_once, config.rollout.prompt_buckets[-1]
        prompts = train_prompts(config.data, self.tokenizer, config.seed, tell_once)
        prompts = fitting(prompts, longest, config.data.overlong, tell_once)
        prompts, self.filter_tokens, measured = kept_prompts(prompts, config.data.keep_file)
        self.evaluated = evaluation_sets(config, self.tokenizer, tell_once)
        evaluated = (prompt for one in self.evaluated for prompt in one.prompts)
        check_rows(self.scorer, config.data, [*prompts, *evaluated])
        check_turns(self.rl.drafts, prompts)
        self.stream = PromptStream(
            prompts, config.seed, [source.repeat for source in config.data.sources]
        )
        self.selector = prompt_selector(
            self.rl.zero_variance,
            self.rl.group_size,
            config.rewards,
            config.seed,
            self.stage,
            measured,
        )
        self.labels = {label_of(prompt) for prompt in prompts}

    def _sync_weights(self) -> dict[str, float]:
        """Syncs the weights to the rollout, and to a judge that uses the policy's."""
        config = self.config
        # The old decode weights are no longer needed: their memory is free for the new ones.
        self.decode = None
        self.judge.use(None, self.learner.version)
        if isinstance(self.engine, RemoteEngine):
            self.decode, metrics = self.engine.receive(self.learner.params, self.learner.version)
            return metrics
        self.decode, metrics = sync_weights(
            self.learner.params,
            config.model,
            config.rollout_compute.dtype,
            config.rollout.quantize,
            placement=self.engine.placement,
            layout=self.engine.layout,
        )
        self.judge.use(self.decode, self.learner.version)
        return metrics

    # ---- checkpoint ------------------------------------------------------------------------------

    def _restore_or_start(
        self, model: Transformer, newest: checkpoint.ValidCheckpoint | None
    ) -> None:
        config = self.config
        if newest is None:
            params = first_parameters(config, model, self.notices.print_once)
            self.learner = Learner.start(config.learner, model, params, config.directory)
            self.notices.of_start(self.learner)
            self.vocab_rows = vocab_rows(
                config.init_from, config.model.family, self.tokenizer.vocab_size
            )
            # Drops the lines of a run that was killed before its first checkpoint.
            self.telemetry.restore(None)
            return
        abstract = placed_structs(jax.eval_shape(self._fresh_arrays), config.model, model.placement)
        if newest.meta().get("pending"):
            abstract["pending"] = self._abstract_in_flight()
        drafts = newest.meta().get("drafts")
        if drafts:
            abstract["drafts"] = abstract_drafts(drafts)
        # A checkpoint of adapters does not have their base.
        frozen = first_parameters(config, model) if config.lora.acts else None
        if frozen is not None:
            check_base(newest.path, newest.meta(), frozen)
        _, arrays, meta = checkpoint.restore(newest, abstract, model=config.model)
        state, reference = (
            in_layout(arrays.get(name), model.layout) for name in ("state", "reference")
        )
        self.learner = Learner(config.learner, model, state, reference, frozen, config.directory)
        self.vocab_rows = meta.get(VOCAB_ROWS, config.model.vocab_size)
        self.stream.restore(meta["stream"])
        self.history.restore(meta["history"])
        self.selector.restore(meta["selector"])
        self.buffer.policy_state = meta.get("step_policy", {})
        self.telemetry.restore(meta["telemetry"])
        self.guard.restore(meta.get("guard", {}), self.done_steps)
        if drafts:
            self.collect.drafts.restore(drafts, arrays["drafts"])
        if "pending" in arrays:
            self._restore_in_flight(meta["pending"], arrays["pending"], str(newest.path))

    def _abstract_in_flight(self) -> JsonObject:
        """Returns the shapes of unfinished samples, with the routes where the engine has them: each
        process reads its rows.
        """
        abstract = jax.eval_shape(lambda: self.buffer.arrays(self.engine.config.max_length))
        if "routes" in abstract and self.engine.placement is not None:
            routes = abstract["routes"]
            sharding = self.engine.placement.rows(len(routes))
            abstract["routes"] = jax.ShapeDtypeStruct(routes.shape, routes.dtype, sharding=sharding)
        return abstract

    def _restore_in_flight(self, state: dict, arrays: JsonObject, path: str) -> None:
        routes = self.engine.adopt(arrays.get("routes"))
        if routes is not None:
            # The last rows are of stored groups without routes.
            lengths = np.asarray(arrays["lengths"])[: len(routes)]
            check_recorded_routes(lengths, routes, self.config.model, path)
            arrays = {**arrays, "routes": routes}
        self.buffer.restore(state, arrays, self.stream.find, self.engine.end_ids)

    def _fresh_arrays(self) -> JsonObject:
        from compass_jax.model.transformer import init_params

        config, key = self.config, jax.random.key(0)
        params = init_params(config.model, config.compute, key)
        tree, frozen = trained.split(config.lora, Transformer(config.model), params, key)
        arrays = {"state": optim.init_state(tree, self.rl.optim, self.rl.total_updates)}
        copies = self.rl.uses_reference and frozen is None
        return {**arrays, "reference": params} if copies else arrays

    def save(self, *, wait: bool = True) -> None:
        """Writes checkpoint `done_steps`, with the unfinished samples; in the background unless
        `wait`.
        """
        # With rl.one_step_off a thread may still be changing the buffer.
        self._await_rollout()
        self.telemetry.phase("saving")
        arrays: JsonObject = {"state": stack(self.learner.state)}
        # The reference of adapters is their base, which init_from names.
        if self.learner.reference is not None and self.learner.frozen is None:
            arrays["reference"] = stack(self.learner.reference)
        if not self.buffer.empty:
            arrays["pending"] = self.buffer.arrays(self.engine.config.max_length)
        if drafts := self.collect.drafts.state():
            arrays["drafts"] = self.collect.drafts.arrays()
        meta = {
            "kind": "rl",
            VOCAB_ROWS: self.vocab_rows,
            **adapter_meta(self.config.lora, self.config.init_from, self.learner.frozen),
            "pending": None if self.buffer.empty else self.buffer.state(),
            "step_policy": self.buffer.policy_state,
            "drafts": drafts,
            "stream": self.stream.state(),
            "history": self.history.state(),
            "selector": self.selector.state(),
            "telemetry": self.telemetry.state(),
            "guard": self.guard.state(),
        }
        self.checkpoints.save(self.done_steps, arrays, meta, wait=wait)

    # ---- one step --------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Runs the remaining steps of the stage; yields (step, metrics) after each. After a stop
        within a step it is `interrupted`, with the unfinished step saved.
        """
        left = self.done_steps < self.stage.end and not self.guard.ended
        compiler = CompileAhead(self.learner.programs() if left else ())
        try:
            yield from self._steps(compiler)
        finally:
            compiler.finish()

    def _steps(self, compiler: CompileAhead) -> Iterator[tuple[int, dict[str, float]]]:
        while self._continues():
            # 1. Collect: rollout and rewards, unless they ran during the last step's updates.
            rollout_metrics = self._collect()
            if rollout_metrics is None:
                return self._interrupt()
            groups = self.buffer.step_groups()
            update = self._update_groups(groups)
            arrays = self._assemble(update)
            # A control experiment: shuffled rewards carry no signal, so nothing should be learnt.
            if self.rl.permute_rewards:
                permute_rewards(arrays, (self.config.seed, self.done_steps))
            step_metrics = self._group_metrics(groups, update, arrays)

            # 2. and 3. Score and update. Programs that still compile ahead would compete with it.
            self.telemetry.phase("training")
            compiler.finish()
            return_freed_memory()
            trace = self.samples.trace(len(groups))
            try:
                train_metrics = self._train(update, arrays, trace)
            except TrainingStopped:
                # It came before the first update, so the groups are still in the buffer.
                return self._interrupt()

            # 4. Sync. From here on the step is done: the next rollout has the new weights.
            sync_metrics = self._sync_weights()
            self.done_steps += 1

            # 5. Log.
            metrics = {
                **rollout_metrics,
                **step_metrics,
                **train_metrics,
                **label_inversion(update.groups, arrays, self.learner.advantage),
                **sync_metrics,
                "policy_version": float(self.learner.version),
                "memory/peak_gib": peak_bytes() / 2**30,
            }
            self.notices.of_update(metrics)
            metrics |= self.guard.of_step(self.done_steps, groups, metrics)
            self.samples.write(self.done_steps, groups, trace, update.ages)
            self.histograms = step_histograms(groups)
            self.callbacks(self.done_steps, groups, metrics)
            yield self.done_steps, metrics

    def _continues(self) -> bool:
        left = self.done_steps < self.stage.end and not self.guard.ended
        return left and not self.stop.requested

    def _interrupt(self) -> None:
        """Saves the step's finished rollouts, with which the same command continues."""
        self.save()
        self.interrupted = True

    def _collect(self) -> dict[str, float] | None:
        """Returns the metrics of the next step's rollout, whose groups are in the buffer; None if
        the run has to stop first.

        Raises:
            StepFailed: every sample failed.
            VerifierError: a verifier or judge cannot be used.
        """
        if self.ahead is None:
            metrics = self._rollout(self.done_steps + 1, self._stopped)()
        else:
            self._await_rollout()
            metrics, self.ahead = self.ahead.result(), None
            if metrics is not None and self._overlaps_sync:
                metrics["time/rollout_wait_s"] = self._waited_s
            self._waited_s = 0.0
        if metrics is None:
            return None
        groups = [self.buffer.group(key) for key in self.buffer.kept]
        self._raise_if_all_failed(groups)
        self.notices.of_rewards(groups, self.collect.turns.response)
        # A rollout that carries samples ignores a stop until here, so that the ticks at which it
        # cuts samples do not depend on the stop.
        stopped = self.collect.policy.carries and self.stop.requested
        return None if stopped or self.notices.ended else metrics

    def _group_metrics(
        self, groups: list[Group], update: UpdateGroups, arrays: StepArrays
    ) -> dict[str, float]:
        """Returns the metrics of a step's groups before the update, and prints notices on them."""
        metrics = {
            **self.notices.of_groups(groups),
            **group_metrics(groups),
            **staleness(update.groups, self.learner.version),
            **self._label_metrics(groups),
            "repetition_frac": self._repetition(update, arrays),
            "epoch": self.stream.epoch,
        }
        if self.rl.group_replay.acts:
            metrics |= update.metrics(len(self.buffer.stored))
        self.notices.of_lengths(arrays.lengths, self.learner.rows_multiple)
        if self.filter_tokens:
            metrics["waste/filter_tokens"] = float(self.filter_tokens)
        if self.stage.total:
            metrics["curriculum/stage"] = float(self.stage.number)
        return metrics

    def _repetition(self, update: UpdateGroups, arrays: StepArrays) -> float:
        """Returns the mean share of repeated n-grams in the responses that the step sampled."""
        sampled, ngram = arrays.group >= 0, self.rl.shaping.repetition_ngram
        if arrays.replayed is not None:
            sampled &= ~arrays.replayed
        replaced = [repetition(x, ngram) for group in update.replaced for x in group.rollouts]
        return float(np.append(arrays.repetition[sampled], np.asarray(replaced, np.float32)).mean())

    def _label_metrics(self, groups: list[Group]) -> dict[str, float]:
        """Returns the metrics of each label, if the data have several labels and at most
        MAX_LABELS.
        """
        if not 1 < len(self.labels) <= MAX_LABELS:
            return {}
        labels = [label_of(group.prompt) for group in groups]
        return label_metrics(groups, labels, self.config.rewards.right_at)

    def _raise_if_all_failed(self, groups: list[Group]) -> None:
        """Raises StepFailed if every sample of the step failed, with the state saved: the same
        command judges the same samples again.
        """
        if why := failure_of(groups):
            self.buffer.forget_verdicts()
            self.save()
            raise StepFailed(
                f"{why}. This step has nothing to learn from. The run stopped after step"
                f" {self.done_steps} and was saved: mend the cause, then run the same command again"
            )

    def _stopped(self) -> bool:
        """Reports progress and returns whether a rollout has to end early. A rollout that may carry
        unfinished samples into the next step is never ended by a stop: which samples it leaves
        unfinished depends on the engine's calls so far, which a resumed rollout would count
        differently.
        """
        expected = len(self.buffer.prompts) * self.rl.group_size
        self.telemetry.phase("rollout", self.buffer.finished, max(expected, self.buffer.finished))
        return not self.collect.policy.carries and self.stop.requested

    def _update_groups(self, groups: list[Group]) -> UpdateGroups:
        """Returns the groups that the step trains on: those that it sampled, with stored groups in
        the places of uniform ones (rl.group_replay).
        """
        if not self.rl.group_replay.acts:
            return UpdateGroups(groups)
        stored, key = list(self.buffer.stored.values()), (self.config.seed, self.done_steps)
        return update_groups(groups, stored, self.learner.version, self.rl.group_replay, key)

    def _assemble(self, update: UpdateGroups) -> StepArrays:
        """Returns the arrays of an update's groups, with routes copied to the training devices, so
        that the next rollout may overwrite the engine's buffer of routes.
        """
        routes = self.buffer.routes_of(
            update.groups, update.live(self.rl.group_replay.max_route_age)
        )
        heats = self.rl.zero_variance.grow_temperature != 1
        return assemble(
            update.groups,
            size=self.rl.capacity,
            length=self.rl.buckets[-1],
            ngram=self.rl.shaping.repetition_ngram,
            routes=self.learner.routes_on_mesh(routes),
            gold=self.config.data.labelled,
            hotter_from=self.rl.group_size if heats else None,
            replayed=update.ages if self.rl.group_replay.acts else None,
            drafts=self.rl.drafts is not None,
        )

    def _end_step(self) -> None:
        """Updates prompt history and selector by the step's groups, and removes these from the
        buffer, but for those that are stored for replay. The next stage samples by other settings,
        so that the last step of a stage stores none.
        """
        results = results_of(self.buffer, self.config.rewards)
        self.history.update(results)
        self.selector.update(results, self.stream.epoch)
        if self.done_steps + 1 >= self.stage.end:
            self.buffer.discard(list(self.buffer.stored))
        elif self.rl.group_replay.acts:
            store_groups(self.buffer, self.learner.version, self.rl.group_replay)
        self.buffer.end_step()

    def _train(
        self, update: UpdateGroups, arrays: StepArrays, trace: TokenTrace | None
    ) -> dict[str, float]:
        """Trains on the update's arrays. The step's groups stay in the buffer until training ends,
        so that a stopped step can be saved.

        With `rl.one_step_off` they are removed first, and a thread collects the next step's groups
        during the updates. The thread reads only state that training does not change: the prompts'
        history, the selector and the synced weights. The step waits for it even after a stop,
        because the sync replaces its weights, so that its rollout could not be resumed; samplers
        that are not in lockstep go on under the new weights. No rollout runs during the last step
        of a stage: the next stage samples by other settings.
        """
        self.learner.progress = partial(self.telemetry.phase, "training")
        train = partial(
            self.learner.train,
            arrays,
            self.buffer.dropped_tokens,
            trace=trace,
            replaced=update.replaced_outcomes(self.config.rewards),
        )
        if not self.rl.one_step_off or self.done_steps + 1 >= self.stage.end:
            metrics = train(stopped=lambda: self.stop.requested)
            self._end_step()
            return metrics
        self._end_step()
        abandoned = threading.Event()
        # The step in training is done_steps + 1, so the next rollout is of the step after it.
        rollout = self._rollout(self.done_steps + 2, abandoned.is_set)
        thread = ThreadPoolExecutor(1, "rollout")
        self.ahead = thread.submit(rollout)
        thread.shutdown(wait=False)  # after this rollout
        try:
            metrics = train()
        except BaseException:
            abandoned.set()
            self._await_rollout()
            raise
        if self._overlaps_sync:
            return metrics
        self._await_rollout()
        error = self.ahead.exception()
        # A VerifierError is raised by the next step: this one is complete.
        if error is not None and not isinstance(error, VerifierError):
            raise error
        return {**metrics, "time/rollout_wait_s": self._waited_s}

    @property
    def _overlaps_sync(self) -> bool:
        """Whether weights reach the samplers while they sample the next rollout."""
        return self.config.samplers.acts and not self.config.samplers.lockstep

    def _await_rollout(self) -> None:
        """Waits for the rollout that runs during the training, if any."""
        started = time.perf_counter()
        if self.ahead is not None:
            # Waits without raising: `_collect` and `_train` raise the rollout's error.
            self.ahead.exception()
            self._waited_s += time.perf_counter() - started

    def _rollout(
        self, number: int, stopped: Callable[[], bool]
    ) -> Callable[[], dict[str, float] | None]:
        """Returns a function that collects the groups of step `number` under the current policy, or
        continues to, and returns its metrics; None where `stopped` came first.
        """
        # Read now: with rl.one_step_off the updates change the version while the rollout runs.
        params, version = self.decode, self.learner.version
        last = number >= self.stage.end

        def draw(n: int) -> list[Prompt]:
            prompts = self.selector.next_batch(self.stream, n)
            if self.selector.acts:
                self.buffer.count({"zero_variance/skipped_prompts": self.selector.skipped})
            if self.selector.notice:
                self.notices.print_once(self.selector.notice)
            return prompts

        def run() -> dict[str, float] | None:
            metrics = self.collect(self.buffer, params, version, draw, last, stopped)
            return metrics and {**metrics, **self.selector.metrics()}

        return run

    def first_rollout(self) -> StepArrays | None:
        """Runs the next step's rollout without training on it; None where a stop came first."""
        collected = self._rollout(self.done_steps + 1, self._stopped)()
        return (
            None if collected is None else self._assemble(UpdateGroups(self.buffer.step_groups()))
        )

    def fall_back(self) -> int:
        """Ends the run with the policy of its newest checkpoint from before the window in which
        reward and gold label parted, or with the policy that it started from; returns its step.
        """
        config, model = self.config, self.learner.model
        # A checkpoint may still be being written in the background.
        self.checkpoints.wait()
        step = checkpoint.latest(config.directory, self.guard.last_sound)
        if step is None:
            params = first_parameters(config, model)
            self.learner = Learner.start(config.learner, model, params, config.directory)
        else:
            fresh = placed_structs(
                jax.eval_shape(self._fresh_arrays), config.model, model.placement
            )
            # Only the state: the reference and the base of adapters are never updated.
            abstract = {"state": fresh["state"]}
            path = checkpoint.find(config.directory, step)
            arrays = checkpoint.restore(path, abstract, model=config.model, subset=True)[1]
            self.learner = Learner(
                config.learner,
                model,
                in_layout(arrays["state"], model.layout),
                self.learner.reference,
                self.learner.frozen,
                config.directory,
            )
        self.guard.ended = True
        self._sync_weights()
        return step or 0

    def header(self) -> list[str]:
        """Returns the run's first lines."""
        work = f"{len(self.stream):,} prompts, {in_words(self.evaluated, self.config.data)}"
        parameters = sum(x.size for x in jax.tree.leaves(self.learner.params))
        memory = memory_line(self.config, self.rl)
        method = rl_method(self.rl, self.config.rollout)
        return header(self.config, work, parameters, self.done_steps, self.rl.steps, memory, method)

    # ---- accounts --------------------------------------------------------------------------------

    def evaluate(
        self, sets: Sequence[PromptSet], keep: Keep | None = None, warns: bool = True
    ) -> Evaluation:
        """Returns the accuracy of the current policy on each of `sets` (see evaluate.evaluate).

        warns: whether to warn of uninformative rewards, which may end the run.
        """
        # With rl.one_step_off a thread may still be sampling on the engine.
        self._await_rollout()
        evaluation = evaluate(
            engine=self.engine,
            params=self.decode,
            sets=sets,
            tokenizer=self.tokenizer,
            scorer=self.scorer,
            config=self.config,
            keep=keep,
            progress=partial(self.telemetry.phase, EVALUATION_PHASE),
        )
        if evaluation.warning and warns:
            self.notices.warn(evaluation.warning)
        return evaluation
