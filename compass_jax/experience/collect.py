"""The loop between the engine and the update: it draws prompts and runs their samples, while the
verifiers score finished ones, until the step has its groups.

A step policy decides on the samples in flight what to do next (experience/step_policies/). So the
same call continues a rollout that was stopped, and returns at once where a rollout is complete and
not yet trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from compass_jax.base.aliases import Tree
from compass_jax.base.records import Group, Outcome, Prompt, Rollout, SampleKey
from compass_jax.config import RewardConfig, SamplingConfig
from compass_jax.experience.buffer import ExperienceBuffer, GroupKey
from compass_jax.experience.growth import queued
from compass_jax.experience.history import outcome
from compass_jax.experience.metrics import carried_metrics, growth_metrics, round_metrics
from compass_jax.experience.step_policies.ask import Decision, PolicyCalls
from compass_jax.experience.step_policies.inputs import StepInputs
from compass_jax.experience.turns import Turns
from compass_jax.rewards.joined import AnyScorer
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine_api import RolloutEngine
from compass_jax.rollout.sampling import Purpose
from compass_jax.rollout.stats import RolloutStats

POLL_S = 0.05  # between looks for a slow verdict, or a stop


def new_buffer(engine: RolloutEngine, config: SamplingConfig) -> ExperienceBuffer:
    """Returns an empty buffer, sized for the configuration."""
    routes = engine.route_buffer(config.routed_groups, config.capacity, config.replay == "R3")
    return ExperienceBuffer(routes, config.holds_routes)


class Collector:
    """Fills a buffer until it has a step's groups.

    Args:
        turns: converts samples to a verifier's text, and an environment's text to tokens.
        expected_length: returns the expected response tokens of a prompt's samples, NaN where
            unknown.
        batcher: runs requests, as Collection does.
        decided: called with groups that are kept or dropped; returns counts for the metrics.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        scorer: AnyScorer,
        turns: Turns,
        expected_length: Callable[[Prompt], float],
        sampling: SamplingConfig,
        rewards: RewardConfig,
        seed: int,
        batcher: Callable[..., Any] = Collection,
        decided: Callable[[Sequence[Group]], Mapping[str, float]] = lambda groups: {},
    ):
        self.engine = engine
        self.scorer = scorer
        self.turns = turns
        self.expected_length = expected_length
        self.sampling = sampling
        self.rewards = rewards
        self.seed = seed
        self.batcher = batcher
        self.step_policy = sampling.policy
        self.decided = decided

    def __call__(
        self,
        buffer: ExperienceBuffer,
        params: Tree,
        policy_version: int,
        draw: Callable[[int], list[Prompt]],
        last: bool,
        stopped: Callable[[], bool],
    ) -> dict[str, float] | None:
        """Fills `buffer` with the step's groups and returns the rollout's metrics; None where a
        stop came first. The same call continues then, or after a restart.

        Args:
            params: decode weights of version `policy_version`.
            draw: returns the next n prompts.
            last: whether no step of this stage follows, so that no sample may be carried over.
            stopped: returns whether the rollout has to end early; called after every call of the
                engine and while slow verifiers are waited for.
        """
        # After a stop the buffer may hold finished samples whose verdicts did not come in time.
        for key in buffer.unjudged:
            self._submit(buffer.samples[key].rollout)
        stats, waited_s = RolloutStats(), self._wait(buffer, stopped)
        if buffer.unjudged:
            return None
        # Whether anything was added since the last decision: a decision without would repeat for
        # ever. True at first, since a stop may have come between the samples and their decision.
        progress = True
        while len(buffer.kept) < self.sampling.prompts_per_step:
            # One round: draw prompts, run samples until none is missing, and let the policy decide.
            inputs = StepInputs(buffer, self.sampling, last, self.rewards)
            calls = PolicyCalls(self.step_policy, inputs)
            prompts = draw(calls.missing_prompts())
            buffer.add(prompts)
            progress = progress or bool(prompts)
            while missing := self._missing(buffer, calls):
                self._sample(buffer, calls, missing, params, policy_version, stats, stopped)
                # A stop that came with the last sample does not discard a rollout that is whole.
                if stopped() and self._missing(buffer, calls):
                    return None
                waited_s += self._wait(buffer, stopped)
                if buffer.unjudged:
                    return None
                progress = True
            self._apply(buffer, calls.decision(progress))
            progress = False
        metrics = {**stats.metrics(), "time/reward_wait_s": waited_s, **buffer.counts}
        return metrics | (carried_metrics(buffer) if self.step_policy.carries else {})

    def _missing(self, buffer: ExperienceBuffer, calls: PolicyCalls) -> list[SampleKey]:
        """Returns the samples to run before the policy can decide."""
        sizes = calls.sizes()
        enough = self._enough(buffer, sizes)()
        return [] if enough else queued(buffer, sizes, self.sampling)

    def _enough(
        self, buffer: ExperienceBuffer, sizes: Mapping[GroupKey, int]
    ) -> Callable[[], bool]:
        """Returns a predicate: whether enough groups are complete at these sizes. It is always
        false for a policy that waits for all groups.
        """
        if not self.step_policy.carries:
            return lambda: False
        needed = self.sampling.prompts_per_step - len(buffer.kept)
        return lambda: sum(buffer.done(group, n) for group, n in sizes.items()) >= needed

    def _sample(
        self,
        buffer: ExperienceBuffer,
        calls: PolicyCalls,
        missing: Sequence[SampleKey],
        params: Tree,
        policy_version: int,
        stats: RolloutStats,
        stopped: Callable[[], bool],
    ) -> None:
        """Runs the missing samples until all are done, a stop comes or, for a policy that carries
        samples, the step has enough.
        """
        sampling, enough = self.sampling, self._enough(buffer, calls.sizes())
        prompts = [buffer.prompts[group] for group in buffer.open]
        paused = [buffer.samples[key].rollout for key in missing if key in buffer.samples]
        collection = self.batcher(
            self.engine,
            params,
            prompts,
            sampling.capacity,
            Purpose.TRAIN,
            self.seed,
            policy_version=policy_version,
            stats=stats,
            keep_routes=sampling.replay == "R3",
            buffer=buffer.routes,
            rows=[buffer.first[prompt.key] for prompt in prompts],
            sample_keys=frozenset(missing),
            carried=paused,
            # In this order, because `stopped` may also report progress.
            enough=lambda: stopped() or enough(),
            expected=[self.expected_length(prompt) for prompt in prompts],
        )
        for rollout in collection:
            buffer.put(rollout, done=True)
            self._submit(rollout)
        # For other policies only a stop leaves samples unfinished. They are discarded: their keys
        # give the same samples again when the step is resumed.
        for rollout in collection.abort() if self.step_policy.carries else ():
            buffer.put(rollout, done=False)

    def _submit(self, rollout: Rollout) -> None:
        text = partial(self.turns.text, rollout)
        self.scorer.submit(rollout.key, rollout.prompt, text)

    def _wait(self, buffer: ExperienceBuffer, stopped: Callable[[], bool]) -> float:
        """Waits until every finished sample has its score, or an environment's answer with which it
        continues, or until a stop while verdicts are slow. Returns seconds.
        """
        started, waiting = time.perf_counter(), set(buffer.unjudged)
        slow = self.scorer.slow
        while waiting and not (slow and stopped()):
            # A slow scorer is polled, since a stop must not wait minutes for a verdict.
            scored = self.scorer.collect(block=not slow)
            if not scored:
                time.sleep(POLL_S)
            for key, score in scored:
                rollout, verdict = self.turns.settled(buffer.samples[key].rollout, score)
                if verdict is None:
                    buffer.put(rollout, done=False)
                else:
                    buffer.judge(key, verdict)
                waiting.discard(key)
        return time.perf_counter() - started

    def _apply(self, buffer: ExperienceBuffer, decision: Decision) -> None:
        """Keeps the groups that the step trains on, and drops those that nothing will train on."""
        kept_groups, dropped_groups = (
            [buffer.group(x) for x in part] for part in (decision.chosen, decision.dropped)
        )
        buffer.count(decision.counts)
        groups = [*kept_groups, *dropped_groups]
        buffer.count(growth_metrics(groups, self.sampling))
        buffer.count(self.decided(groups))
        buffer.keep(decision.chosen)
        for key, group in zip(decision.dropped, dropped_groups, strict=True):
            buffer.drop(key, outcome(group, self.rewards))
        buffer.policy_state = decision.state
        rounds = len(buffer.prompts) // self.sampling.prompts_per_round
        last = rounds == self.sampling.zero_variance.dynamic_rounds
        buffer.count(round_metrics(kept_groups, dropped_groups, last, self.sampling))


def results_of(buffer: ExperienceBuffer, rewards: RewardConfig) -> list[tuple[Prompt, Outcome]]:
    """Returns the outcomes of the kept and dropped groups, in the order of their prompts."""
    of_kept = {key: outcome(buffer.group(key), rewards) for key in buffer.kept}
    outcomes = {**buffer.dropped, **of_kept}
    return [(prompt, outcomes[key]) for key, prompt in buffer.prompts.items() if key in outcomes]
