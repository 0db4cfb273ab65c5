"""Screening: a few samples of each prompt, and the others only for groups likely to vary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from compass_jax.base.records import Score
from compass_jax.config import SamplingConfig
from compass_jax.config.errors import check
from compass_jax.config.ranges import Fraction, Range, Repeat
from compass_jax.config.step_policy import GroupKey
from compass_jax.experience.growth import known_rewards, varies
from compass_jax.experience.step_policies.inputs import StepInputs
from compass_jax.experience.step_policies.rounds import InRounds
from compass_jax.rl.grouping import UNIFORM_WITHIN


@dataclass(frozen=True)
class Screening(InRounds):
    """Samples `n0` answers to each prompt, and the other rl.group_size - n0 only where the group is
    likely to vary then (after SPEED, arXiv 2506.09016). In a single round no sample is dropped: the
    update has groups of n0 and of n = rl.group_size.

    A group continues as soon as two of its first n0 rewards differ. For one whose rewards are equal
    let a and b count the right and the wrong ones, plus those of the prior: Beta(1, 1), or the
    prediction of rl.zero_variance.posterior. It continues if its chance to vary

        P = 1 - prod_{i < n - n0} (a + i) / (a + b + i)        all right
        P = 1 - prod_{i < n - n0} (b + i) / (a + b + i)        all wrong

    is at least `min_chance`, or `min_chance_hard` where all n0 are wrong: a rare right answer
    teaches most. Equal rewards between right and wrong have the prior Beta(1, 1).

    The advantage of a group is that of rl.advantage over all its samples. The number of samples
    depends on the rewards, so the estimate of the gradient is biased. For rewards of 0 and 1 the
    expected gradient of a prompt with pass rate p is w(p) grad p for any policy, with the weight

        w(p) = E[f(K)] / (p (1 - p))        K right answers of n
        f(K) = K (n - K) / (n (n - 1))      RLOO, so that w = 1: unbiased
               sqrt(K (n - K)) / n          GRPO
               (n - K) / n, 0 for K = 0     MaxRL

    for full groups. Screening removes from E[f(K)] only the part of the groups that stop, which
    have an advantage of 0: it never changes the direction of a prompt's gradient, but gives prompts
    that are nearly always right or wrong less weight. With n0 = 4 of n = 8, where only groups that
    vary already continue (`min_chance` and `min_chance_hard` 1), RLOO's weight is 0.65 at p = 0.1
    and 0.9, 0.84 at 0.3 and 0.7, 0.90 at 0.5. Objectives that average over all tokens (DAPO, CISPO)
    have these weights up to a factor that the prompts of an update share.
    The advantages `predicted` and `shrunk` weigh each sample alike and have, for any rewards, the
    weight E[number of samples] / n. RL-ZVP and shaping act on groups that stop as on any uniform
    group.
    """

    n0: Annotated[int, Range(2, 64)] = 2
    """Number of samples of each prompt before the others, fewer than rl.group_size."""
    min_chance: Fraction = 0.5
    """Minimum probability that a group varies with all its samples, for it to get them; 1: only
    groups that vary already.
    """
    min_chance_hard: Fraction = 0.25
    """The same for groups whose first n0 answers are all wrong."""
    rounds: Repeat = 1
    """Maximum number of rounds of rl.prompts_per_step prompts that a step draws until as many
    groups vary; uniform groups of the last one fill the rest.
    """

    def most_rounds(self, sampling: SamplingConfig) -> int:
        """Returns `rounds`."""
        return self.rounds

    def grow(self, inputs: StepInputs, group: GroupKey) -> int:
        """Returns n0, or rl.group_size for a group that continues."""
        # Only the first n0 scores count, so that later ones do not change the decision; two that
        # differ decide it before the others are known.
        first = inputs.scores(group)[: self.n0]
        scores = [score for score in first if score is not None]
        if len(scores) < self.n0 and not _differ(scores):
            return self.n0
        continues = self._continues(inputs, group, scores)
        return inputs.sampling.group_size if continues else self.n0

    def round_of(self, sampling: SamplingConfig, index: int) -> int:
        """Returns 0 for the first n0 samples, 1 for the others."""
        return int(index >= self.n0)

    def first_samples(self, sampling: SamplingConfig) -> int:
        """Returns n0."""
        return self.n0

    def counts(self, inputs: StepInputs, chosen: Sequence[GroupKey]) -> dict[str, float]:
        """Returns metrics of the round's groups that stopped and of those that continued, dropped
        ones included.
        """
        groups, n = [inputs.group(key) for key in inputs.open], inputs.sampling.group_size
        continued = [group for group in groups if len(group.rollouts) > self.n0]
        stopped = len(groups) - len(continued)
        uniform = [group for group in continued if not _differ(group.scores[: self.n0])]
        tokens = sum(r.sampled_length for x in continued for r in x.rollouts[self.n0 :])
        # The metrics of a step's rounds are summed: that of a share gets the change.
        before = inputs.buffer.counts
        all_stopped = before.get("screening/stopped_groups", 0.0) + stopped
        share = all_stopped / inputs.drawn - before.get("screening/stopped_frac", 0.0)
        return {
            "screening/stopped_groups": stopped,
            "screening/stopped_frac": share,
            "screening/saved_samples": stopped * (n - self.n0),
            "screening/continued_tokens": tokens,
            "screening/continued_uniform_groups": len(uniform),
            "screening/rescued_groups": sum(map(varies, uniform)),
        }

    def check(self, sampling: SamplingConfig) -> None:
        """Raises ConfigError for settings that also decide on the number of samples, and for an n0
        that leaves none.
        """
        super().check(sampling)
        n, grow_to = sampling.group_size, sampling.zero_variance.grow_to
        check(
            grow_to == 0,
            f"rl.zero_variance.grow_to = {grow_to} with {self.key}.name = {self.name!r}: growth"
            " gives uniform groups more samples and screening gives them fewer; set grow_to to 0,"
            f" or set {self.key} to none",
        )
        check(
            self.n0 < n,
            f"{self.key}.n0 = {self.n0}: rl.group_size = {n} leaves no samples to decide on; raise"
            f" rl.group_size, lower n0 (at least 2), or set {self.key} to none",
        )
        check(
            max(self.min_chance, self.min_chance_hard) > 0,
            f"{self.key}.min_chance = {self.key}.min_chance_hard = 0: every group would get all its"
            f" samples; raise one of them, or set {self.key} to none",
        )

    def _continues(self, inputs: StepInputs, group: GroupKey, scores: Sequence[Score]) -> bool:
        if _differ(scores):
            return True
        rewards, prior = known_rewards(scores), inputs.predicted_pass_rate(group)
        further = inputs.sampling.group_size - self.n0
        right, wrong, least = len(rewards), 0, self.min_chance
        if rewards and max(rewards) <= inputs.rewards.wrong_at:
            right, wrong, least = 0, len(rewards), self.min_chance_hard
        elif rewards and min(rewards) < inputs.rewards.right_at:
            prior = 1.0, 1.0  # neither right nor wrong: the pass rate does not predict it
        return chance_to_vary(right, wrong, further, prior) >= least


def chance_to_vary(right: int, wrong: int, further: int, prior: tuple[float, float]) -> float:
    """Computes the probability that a group has right and wrong answers after `further` samples,
    with the pass rate's prior Beta(alpha, beta) and `right` and `wrong` answers so far.
    """
    alpha, beta = prior[0] + right, prior[1] + wrong
    total = alpha + beta
    all_right = math.prod((alpha + i) / (total + i) for i in range(further))
    all_wrong = math.prod((beta + i) / (total + i) for i in range(further))
    # With a wrong answer the group cannot become all right, nor all wrong with a right one.
    return 1.0 - (0.0 if wrong else all_right) - (0.0 if right else all_wrong)


def _differ(scores: Sequence[Score]) -> bool:
    """Returns whether two known rewards differ."""
    rewards = known_rewards(scores)
    return bool(rewards) and max(rewards) - min(rewards) > UNIFORM_WITHIN
