"""APRIL's partial rollouts (arXiv 2509.18521)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from compass_jax.config import SamplingConfig, StepPolicy
from compass_jax.config.errors import check
from compass_jax.config.step_policy import GroupKey
from compass_jax.experience.step_policies.inputs import StepInputs


@dataclass(frozen=True)
class PartialRollouts(StepPolicy):
    """Has rl.partial_prompts more prompts in flight than the step needs; trains on the first
    prompts_per_step complete groups and carries the others into the next step. The last step of a
    run draws only its own prompts.
    """

    carries: ClassVar[bool] = True

    def missing(self, inputs: StepInputs) -> int:
        """Returns as many prompts as fill what may be in flight."""
        sampling = inputs.sampling
        limit = sampling.prompts_per_step if inputs.last else self.groups_in_flight(sampling)
        return max(0, limit - inputs.drawn)

    def chosen(self, inputs: StepInputs) -> list[GroupKey]:
        """Returns the first complete groups."""
        return inputs.complete[: inputs.needed]

    def groups_in_flight(self, sampling: SamplingConfig) -> int:
        """Returns the prompts of a step and the further ones."""
        return sampling.prompts_per_step + sampling.partial_prompts

    def check(self, sampling: SamplingConfig) -> None:
        """Raises ConfigError unless rl.partial_prompts is set."""
        check(
            sampling.partial_prompts > 0,
            f"{self.key}.name = {self.name!r}: set rl.partial_prompts, the number of further"
            " prompts in flight",
        )
