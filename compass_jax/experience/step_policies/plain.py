"""The policy without further settings."""

from __future__ import annotations

from dataclasses import dataclass

from compass_jax.config import StepPolicy
from compass_jax.config.step_policy import GroupKey
from compass_jax.experience.step_policies.inputs import StepInputs


@dataclass(frozen=True)
class Plain(StepPolicy):
    """Draws a step's prompts and trains on all their groups."""

    def missing(self, inputs: StepInputs) -> int:
        """Returns the step's prompts that are not in flight yet."""
        return inputs.sampling.prompts_per_step - inputs.drawn

    def chosen(self, inputs: StepInputs) -> list[GroupKey]:
        """Returns every group."""
        return inputs.open
