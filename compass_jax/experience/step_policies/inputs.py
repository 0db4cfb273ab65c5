"""The inputs of a step policy."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

from compass_jax.base.aliases import JsonMapping
from compass_jax.base.records import Group, Prompt, Score
from compass_jax.config import RewardConfig, SamplingConfig
from compass_jax.config.step_policy import GroupKey
from compass_jax.experience import growth
from compass_jax.experience.buffer import ExperienceBuffer


class StepInputs(NamedTuple):
    """The samples in flight, as a step policy sees them. A group is open until the policy chooses
    or drops it.
    """

    buffer: ExperienceBuffer
    sampling: SamplingConfig
    last: bool  # whether this is the run's last step
    rewards: RewardConfig = RewardConfig()

    @property
    def open(self) -> list[GroupKey]:
        """The open groups, in the order in which their prompts were drawn."""
        return self.buffer.open

    @property
    def complete(self) -> list[GroupKey]:
        """The open groups whose samples are all scored, at the size that `StepPolicy.grow` gives
        them.
        """
        policy, buffer = self.sampling.policy, self.buffer
        return [key for key in self.open if buffer.done(key, policy.grow(self, key))]

    @property
    def drawn(self) -> int:
        """The number of prompts that were drawn for the step or carried into it: those of chosen,
        dropped and open groups.
        """
        return len(self.buffer.prompts)

    @property
    def needed(self) -> int:
        """The number of groups that the step still needs."""
        return self.sampling.prompts_per_step - len(self.buffer.kept)

    @property
    def state(self) -> JsonMapping:
        """The policy's state, as `StepPolicy.next_state` returned it."""
        return MappingProxyType(self.buffer.policy_state)

    def prompt(self, key: GroupKey) -> Prompt:
        """Returns a group's prompt."""
        return self.buffer.prompts[key]

    def predicted_pass_rate(self, key: GroupKey) -> tuple[float, float]:
        """Returns alpha and beta of the Beta distribution that rl.zero_variance.posterior predicted
        for the pass rate of the group's prompt when it was drawn; Beta(1, 1) without it.
        """
        return self.prompt(key).predicted

    def scores(self, key: GroupKey) -> list[Score | None]:
        """Returns the scores of a group's samples, in order, up to the last finished one; None
        for a sample that has no score yet.
        """
        return self.buffer.scores(key)

    def group(self, key: GroupKey) -> Group:
        """Returns a complete group: prompt, rollouts and scores."""
        return self.buffer.group(key)

    def varies(self, key: GroupKey) -> bool:
        """Returns whether two known rewards of a complete group differ."""
        return growth.varies(self.group(key))

    def doubled_size(self, key: GroupKey) -> int:
        """Returns rl.group_size, doubled up to rl.zero_variance.grow_to while all samples of the
        group are scored and uniform.
        """
        return growth.doubled_size(self.scores(key), self.sampling)
