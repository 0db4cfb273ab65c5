"""The RL loop: prompts -> rollout (scored as samples finish) -> old log-probs -> updates -> weight
sync -> checkpoint.

A group is all samples of one prompt: `group_size` of them, or more after growth. A step policy
(experience/step_policies/) decides which groups a step trains on and which samples are still
missing. Routes are the experts that a router chose for each token.

One step:
 1. collect: draw the next prompts and sample their groups under the synced weights, while verifiers
    judge finished samples
 2. old log-probs: one pass of the training model at the step's first parameters fixes log-probs and
    entropies. Routes are replayed so that old and new log-probs are of the same experts: those of
    the rollout (rollout router replay, R3), or those of this pass in the updates (R2). Log-probs of
    the first update's rows come from its own forward pass
 3. update: prepare (advantages, weights over the whole update), gradients summed over
    micro-batches, apply
 4. sync the weights to the rollout

What a run does beside that, such as metrics, notices and logs, is in hooks (training/hooks/), which
are called in between. training/building.py makes the parts of a trainer.

With `rl.partial_prompts`, collecting ends before the longest samples are finished: they are carried
into the next step. With `rl.one_step_off`, the rollout of step n + 1 runs during the updates of
step n, with the weights from before them, and rl.correction compensates. A hook may hold
groups past their step and train on them in the places of others. A step depends on the checkpoint
only, so a killed run repeats its steps exactly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from compass_jax.base.errors import CompassError
from compass_jax.base.records import Group, Prompt, StepArrays
from compass_jax.config.curriculum import Stage
from compass_jax.devices.machine import return_freed_memory
from compass_jax.experience.assemble import assemble, columns_of
from compass_jax.experience.collect import results_of
from compass_jax.experience.history import outcome
from compass_jax.experience.judged import failure_of
from compass_jax.rewards.faults import VerifierError
from compass_jax.rl.zero_variance import waste_of_dropped, waste_of_replaced
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training.ahead import CompileAhead
from compass_jax.training.hooks.base import Hook, StepRecord
from compass_jax.training.parts import Parts
from compass_jax.training.session import RunState
from compass_jax.training.stops import TrainingStopped


class StepFailed(CompassError, RuntimeError):
    """Every sample of a step failed; the message has the reason."""


class RLTrainer:
    """One stage of a run. `steps()` yields each finished step; `save()` writes a checkpoint."""

    def __init__(
        self,
        stage: Stage,
        done_steps: int,
        parts: Parts,
        telemetry: Telemetry,
        run_state: RunState,
    ):
        """Creates a trainer of a stage's steps after `done_steps`."""
        self.config, self.rl = parts.saved.config, parts.saved.config.rl
        self.stage, self.done_steps = stage, done_steps
        self.parts, self.learner, self.buffer = parts, parts.learner, parts.buffer
        self.collect, self.hooks = parts.collect, parts.hooks
        self.telemetry, self.run_state = telemetry, run_state
        # the rollout that ran during the last step's updates, with its metrics or its error
        self.ahead: Future[dict[str, float] | None] | None = None
        self._waited_s = 0.0  # for this rollout
        self.interrupted = False  # whether the run was interrupted within a step
        parts.weights.sync(self.learner)

    def save(self, *, wait: bool = True) -> None:
        """Writes checkpoint `done_steps`, with the unfinished samples; in the background unless
        `wait`.
        """
        # With rl.one_step_off a thread may still be changing the buffer.
        self.await_rollout()
        self.telemetry.phase("saving")
        self.parts.saved.save(self.done_steps, self.learner, wait=wait)

    def fall_back(self, last: int) -> int:
        """Takes the policy of the newest checkpoint up to step `last`, or the one that the run
        started from; returns its step. The guard ends a run so: the steps are not repeated.
        """
        step, self.learner = self.parts.saved.earlier(last, self.learner)
        self.parts.weights.sync(self.learner)
        return step

    # ---- one step --------------------------------------------------------------------------------

    def steps(self) -> Iterator[StepRecord]:
        """Runs the remaining steps of the stage; yields each when it is finished. After a stop
        within a step the trainer is `interrupted`, with the unfinished step saved.
        """
        remain = self.done_steps < self.stage.end and not self.run_state.ended
        compiler = CompileAhead(self.learner.programs() if remain else ())
        try:
            while self._continues():
                step = self._step(compiler)
                if step is None:
                    # Saved with its finished rollouts, with which the same command continues.
                    self.save()
                    self.interrupted = True
                    return
                yield step
        finally:
            compiler.finish()

    def _continues(self) -> bool:
        remain = self.done_steps < self.stage.end and not self.run_state.ended
        return remain and not self.run_state.interrupted

    def _step(self, compiler: CompileAhead) -> StepRecord | None:
        """Runs one step; returns None where an interruption came before its first update."""
        # 1. Collect: rollout and rewards, unless they ran during the last step's updates.
        metrics = self._collect()
        if metrics is None:
            return None
        groups = self.buffer.step_groups()
        self._raise_if_all_failed(groups)
        step = StepRecord(
            self.done_steps + 1,
            groups,
            self.learner.version,
            self.config.seed,
            self.buffer.held,
            self.rl.held_groups,
            metrics=metrics,
            end=self.run_state.end,
        )
        self.hooks.begin_step(step)
        # A rollout that carries samples ignores an interruption until here, so that the calls of
        # the engine after which it cuts samples do not depend on it.
        if self.run_state.interrupted:
            return None
        step.arrays = arrays = self._assemble(step.trained, step.earlier)
        self.hooks.call(Hook.on_arrays, step)

        # 2. and 3. Old log-probs and updates, with which programs that still compile ahead would
        # compete.
        self.telemetry.phase("training")
        compiler.finish()
        return_freed_memory()
        try:
            step.metrics |= self._train(step, arrays)
        except TrainingStopped:
            # It came before the first update, so the groups are still in the buffer.
            return None
        step.advantage, step.entropy = self.learner.advantage, self.learner.entropy
        self.hooks.finish(Hook.after_update, step)

        # 4. Sync. From here on the step is done: the next rollout has the new weights.
        step.metrics |= self.parts.weights.sync(self.learner)
        step.metrics["policy_version"] = float(self.learner.version)
        self.done_steps += 1
        self.hooks.end_step(step)
        return step

    def _collect(self) -> dict[str, float] | None:
        """Returns the metrics of the next step's rollout, whose groups are in the buffer; None if
        the run has to stop first. Raises VerifierError where a verifier or judge cannot be used.
        """
        if self.ahead is None:
            self.hooks.begin_rollout(self.done_steps + 1)
            return self._rollout(self.done_steps + 1, self._stopped)()
        self.await_rollout()
        metrics, self.ahead = self.ahead.result(), None
        if metrics is not None and self._overlaps_sync:
            metrics["time/rollout_wait_s"] = self._waited_s
        self._waited_s = 0.0
        return metrics

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
        return not self.collect.step_policy.carries and self.run_state.interrupted

    def _assemble(self, groups: list[Group], earlier: Mapping[int, bool]) -> StepArrays:
        """Returns the arrays of the groups that a step trains on, with routes copied to the
        training devices, so that the next rollout may overwrite the engine's buffer of routes.
        `earlier`: the places of groups of earlier steps, and whether they are routed live.
        """
        routes = self.buffer.routes_of(groups, [place for place, live in earlier.items() if live])
        return assemble(
            groups,
            size=self.rl.capacity,
            length=self.rl.buckets[-1],
            ngram=self.rl.shaping.repetition_ngram,
            routes=self.learner.routes_on_mesh(routes),
            columns=columns_of(self.rl, self.config.data.labelled),
            earlier=earlier if self.rl.held_groups else None,
        )

    def _end_step(self, step: StepRecord) -> None:
        """Updates prompt history and selector by the step's groups, and removes these from the
        buffer, but for those that hooks hold. The next stage samples by other settings, so that
        the last step of a stage leaves none.
        """
        results = results_of(self.buffer, self.config.rewards)
        self.parts.history.update(results)
        self.parts.prompts.selector.update(results, self.parts.prompts.stream.epoch)
        self.buffer.end_step(step.to_hold if step.number < self.stage.end else ())

    def _train(self, step: StepRecord, arrays: StepArrays) -> dict[str, float]:
        """Trains on the step's arrays. Its groups stay in the buffer until training ends, so that a
        stopped step can be saved.

        With `rl.one_step_off` they are removed first, and a thread collects the next step's groups
        during the updates. The thread reads only state that training does not change: the prompts'
        history, the selector and the synced weights. The step waits for it even after a stop,
        because the sync replaces its weights, so that its rollout could not be resumed; samplers
        that are not in lockstep go on under the new weights. No rollout runs during the last step
        of a stage: the next stage samples by other settings.
        """
        self.learner.progress = partial(self.telemetry.phase, "training")
        self.learner.rate = step.rate
        replaced = [outcome(group, self.config.rewards) for group in step.replaced]
        accounts = waste_of_dropped(self.buffer.dropped_tokens), waste_of_replaced(replaced)
        train = partial(self.learner.train, arrays, accounts, trace=step.trace)
        if not self.rl.one_step_off or step.number >= self.stage.end:
            metrics = train(stopped=lambda: self.run_state.interrupted)
            self._end_step(step)
            return metrics
        # Before the groups leave the buffer: where a hook fails, the step is saved with them.
        self.hooks.begin_rollout(step.number + 1)
        self._end_step(step)
        abandoned = threading.Event()
        rollout = self._rollout(step.number + 1, abandoned.is_set)
        thread = ThreadPoolExecutor(1, "rollout")
        self.ahead = thread.submit(rollout)
        thread.shutdown(wait=False)  # after this rollout
        try:
            metrics = train()
        except BaseException:
            abandoned.set()
            self.await_rollout()
            raise
        if self._overlaps_sync:
            return metrics
        self.await_rollout()
        error = self.ahead.exception()
        # A VerifierError is raised by the next step: this one is complete.
        if error is not None and not isinstance(error, VerifierError):
            raise error
        return {**metrics, "time/rollout_wait_s": self._waited_s}

    @property
    def _overlaps_sync(self) -> bool:
        """Whether weights reach the samplers while they sample the next rollout."""
        return self.config.samplers.acts and not self.config.samplers.lockstep

    def await_rollout(self) -> None:
        """Waits for the rollout that runs during the training, if any: the engine is then free."""
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
        params, version = self.parts.weights.params, self.learner.version
        last, selector = number >= self.stage.end, self.parts.prompts.selector

        def draw(n: int) -> list[Prompt]:
            prompts = selector.next_batch(self.parts.prompts.stream, n)
            if selector.acts:
                self.buffer.count({"zero_variance/skipped_prompts": selector.skipped})
            return prompts

        def run() -> dict[str, float] | None:
            metrics = self.collect(self.buffer, params, version, draw, last, stopped)
            return metrics and {**metrics, **selector.metrics()}

        return run
