"""Steps of groups that vary, for which a policy draws prompts in rounds."""

from __future__ import annotations

from dataclasses import dataclass

from compass_jax.config import SamplingConfig, StepPolicy
from compass_jax.config.step_policy import GroupKey
from compass_jax.experience.step_policies.inputs import StepInputs


@dataclass(frozen=True)
class InRounds(StepPolicy):
    """The base of policies that draw prompts in rounds, until a step has rl.prompts_per_step groups
    with at least two known rewards that differ. The other groups are dropped; after the last round
    those of that round fill the rest, in the order in which they were drawn. So a single round of
    rl.prompts_per_step prompts drops none.
    """

    def missing(self, inputs: StepInputs) -> int:
        """Returns a round's prompts, once the groups of the round before are decided."""
        return 0 if inputs.open else self.prompts_per_round(inputs.sampling)

    def chosen(self, inputs: StepInputs) -> list[GroupKey]:
        """Returns the groups that vary; in the last round, then uniform ones."""
        sampling = inputs.sampling
        last = self.most_rounds(sampling) * self.prompts_per_round(sampling)
        if inputs.drawn >= last and len(inputs.open) == inputs.needed:
            return inputs.open
        chosen = [key for key in inputs.open if inputs.varies(key)][: inputs.needed]
        if inputs.drawn >= last:
            uniform = [key for key in inputs.open if key not in chosen]
            chosen += uniform[: inputs.needed - len(chosen)]
        return chosen

    def prompts_per_round(self, sampling: SamplingConfig) -> int:
        """Returns rl.prompts_per_step."""
        return sampling.prompts_per_step

    def groups_in_flight(self, sampling: SamplingConfig) -> int:
        """Returns a round's groups and those kept from earlier rounds."""
        earlier = sampling.prompts_per_step if self.most_rounds(sampling) > 1 else 0
        return self.prompts_per_round(sampling) + earlier
