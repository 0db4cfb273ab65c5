"""The loop between the engine and the update: prompts are drawn, their samples run while the
verifiers score what has finished, until the step has its groups.

What to do next is a policy's decision over what is in flight (experience/policies.py). So a rollout
that was stopped goes on by the same call, and one that nobody has trained on yet is finished by it
at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from compass_jax.config import RewardConfig, RLConfig
from compass_jax.experience.buffer import ExperienceBuffer
from compass_jax.experience.history import outcome
from compass_jax.experience.metrics import carried_metrics, growth_metrics, round_metrics
from compass_jax.experience.policies import doublings, grow, policy_of, queued
from compass_jax.experience.turns import Turns
from compass_jax.records import Outcome, Prompt, Rollout, SampleKey
from compass_jax.rewards.joined import AnyScorer
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.rollout.stats import RolloutStats

LOOK_AGAIN_S = 0.05  # for a slow verdict, or a stop


def new_buffer(engine: Engine, config: RLConfig) -> ExperienceBuffer:
    """Nothing in flight, with room for all that can be."""
    new = engine.new_routes if config.replay == "R3" else lambda rows: None
    rooms = new, engine.taken_routes, groups_in_flight(config), config.capacity
    return ExperienceBuffer(RouteBuffer(*rooms))


def groups_in_flight(config: RLConfig) -> int:
    """Those of a round, and beside them those that earlier rounds of dynamic sampling kept."""
    kept = config.prompts_per_step if config.zero_variance.dynamic_sampling else 0
    return config.prompts_per_round + kept


def sampler_of(engine: Engine, config: RLConfig, doubled: int) -> Sampler:
    """The sampler of groups that have been doubled so often."""
    plain = engine.default_sampler()
    hotter = config.zero_variance.grow_temperature**doubled
    return replace(plain, temperature=plain.temperature * hotter)


class Collector:
    """Fills a buffer until it has a step's groups.

    Args:
        turns: makes of a sample what its verifier reads, and of what an environment says tokens.
        expected_length: response tokens expected of a prompt's samples, NaN where unknown.
        batcher: runs requests, as Collection does.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: AnyScorer,
        turns: Turns,
        expected_length: Callable[[Prompt], float],
        rl: RLConfig,
        rewards: RewardConfig,
        seed: int,
        batcher: Callable[..., Any] = Collection,
    ):
        self.engine = engine
        self.scorer = scorer
        self.turns = turns
        self.expected_length = expected_length
        self.rl = rl
        self.rewards = rewards
        self.seed = seed
        self.batcher = batcher
        self.policy = policy_of(rl)

    def __call__(
        self,
        buffer: ExperienceBuffer,
        params: Any,
        policy_version: int,
        draw: Callable[[int], list[Prompt]],
        last: bool,
        stopped: Callable[[], bool],
    ) -> dict[str, float] | None:
        """The rollout's metrics, once `buffer` keeps the step's groups; None where a stop came
        first. The same call goes on from there, then or after a restart.

        Args:
            params: for decoding; `policy_version` is theirs.
            draw: gives the next n prompts.
            last: no step comes after this one.
            stopped: whether the rollout has to end; asked after every call of the engine.
        """
        for key in buffer.unscored:  # a stop came before their verdicts
            self._submit(buffer.samples[key].rollout)
        stats, waited_s = RolloutStats(), self._wait(buffer, stopped)
        if buffer.unscored:
            return None
        while len(buffer.kept) < self.rl.prompts_per_step:
            buffer.add(draw(self.policy.missing(buffer, last)))
            while missing := self._missing(buffer):
                self._sample(buffer, missing, params, policy_version, stats, stopped)
                if stopped() and self._missing(buffer):
                    return None
                waited_s += self._wait(buffer, stopped)
                if buffer.unscored:
                    return None
            self._decide(buffer)
        metrics = {**stats.metrics(), "time/reward_wait_s": waited_s, **buffer.counts}
        return metrics | (carried_metrics(buffer) if self.policy.carries else {})

    def _missing(self, buffer: ExperienceBuffer) -> list[SampleKey]:
        """The samples to run before anything can be decided."""
        return [] if self._enough(buffer)() else queued(buffer, self.rl, self.policy.carries)

    def _enough(self, buffer: ExperienceBuffer) -> Callable[[], bool]:
        """Whether a step's groups are whole at the sizes of now; never, where all have to be."""
        if not self.policy.carries:
            return lambda: False
        sizes = {group: grow(buffer.scores(group), self.rl) for group in buffer.open}
        wanted = self.rl.prompts_per_step
        return lambda: sum(buffer.done(group, n) for group, n in sizes.items()) >= wanted

    def _sample(
        self,
        buffer: ExperienceBuffer,
        missing: Sequence[SampleKey],
        params: Any,
        policy_version: int,
        stats: RolloutStats,
        stopped: Callable[[], bool],
    ) -> None:
        """Runs the missing samples, until all are done, a stop comes or, where the rest is carried,
        the step has enough.
        """
        rl, enough = self.rl, self._enough(buffer)
        prompts = [buffer.prompts[group] for group in buffer.open]
        begun = [buffer.samples[key].rollout for key in missing if key in buffer.samples]
        collection = self.batcher(
            self.engine,
            params,
            prompts,
            rl.capacity,
            Purpose.TRAIN,
            self.seed,
            policy_version=policy_version,
            stats=stats,
            sampler=sampler_of(self.engine, rl, doublings(missing[0].index, rl)),
            keep_routes=rl.replay == "R3",
            buffer=buffer.routes,
            rows=[buffer.first_row(prompt.key) for prompt in prompts],
            asked=frozenset(missing),
            carried=begun,
            enough=lambda: stopped() or enough(),
            expected=[self.expected_length(prompt) for prompt in prompts],
        )
        for rollout in collection:
            buffer.put(rollout, done=True)
            self._submit(rollout)
        for rollout in collection.cut() if self.policy.carries else ():
            buffer.put(rollout, done=False)

    def _submit(self, rollout: Rollout) -> None:
        text = partial(self.turns.text, rollout)
        self.scorer.submit(rollout.key, rollout.prompt, text)

    def _wait(self, buffer: ExperienceBuffer, stopped: Callable[[], bool]) -> float:
        """Until every sample that is done has its score, or an environment's answer, with which it
        goes on, or a stop comes while verdicts are slow; seconds.
        """
        started, waiting = time.perf_counter(), set(buffer.unscored)
        slow = self.scorer.slow
        while waiting and not (slow and stopped()):
            found = self.scorer.collect(block=not slow)
            if not found:
                time.sleep(LOOK_AGAIN_S)
            for key, score in found:
                rollout, verdict = self.turns.settled(buffer.samples[key].rollout, score)
                if verdict is None:
                    buffer.put(rollout, done=False)
                else:
                    buffer.judge(key, verdict)
                waiting.discard(key)
        return time.perf_counter() - started

    def _decide(self, buffer: ExperienceBuffer) -> None:
        """Keeps the groups that the step trains on; those that nobody will train on are dropped."""
        chosen, others = self.policy.chosen(buffer), []
        if not self.policy.carries:
            others = [group for group in buffer.open if group not in chosen]
        kept, dropped = ([buffer.group(x) for x in part] for part in (chosen, others))
        buffer.count(growth_metrics([*kept, *dropped], self.rl))
        buffer.keep(chosen)
        for key, group in zip(others, dropped, strict=True):
            buffer.drop(key, outcome(group, self.rewards))
        rounds = len(buffer.prompts) // self.rl.prompts_per_round
        last = rounds == self.rl.zero_variance.dynamic_rounds
        buffer.count(round_metrics(kept, dropped, last, self.rl))


def results_of(buffer: ExperienceBuffer, rewards: RewardConfig) -> list[tuple[Prompt, Outcome]]:
    """What is to be remembered of the groups that were kept or dropped, as their prompts came."""
    kept = {key: outcome(buffer.group(key), rewards) for key in buffer.kept}
    found = {**buffer.dropped, **kept}
    return [(prompt, found[key]) for key, prompt in buffer.prompts.items() if key in found]
