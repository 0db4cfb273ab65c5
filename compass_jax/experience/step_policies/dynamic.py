"""DAPO's dynamic sampling (arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from compass_jax.config import SamplingConfig, StepPolicy
from compass_jax.config.errors import check
from compass_jax.config.step_policy import GroupKey
from compass_jax.experience.step_policies.inputs import StepInputs


@dataclass(frozen=True)
class DynamicSampling(StepPolicy):
    """Draws prompts in rounds of dynamic_batch * prompts_per_step and keeps groups with at least
    two known rewards that differ, until there are prompts_per_step; after dynamic_rounds, uniform
    groups of the last round fill the rest. Its settings are those of rl.zero_variance.
    """

    def missing(self, inputs: StepInputs) -> int:
        """Returns a round's prompts, once the groups of the last round are decided."""
        return 0 if inputs.open else inputs.sampling.prompts_per_round

    def chosen(self, inputs: StepInputs) -> list[GroupKey]:
        """Returns the groups that vary; in the last round, then others."""
        sampling = inputs.sampling
        varied = [key for key in inputs.open if inputs.varies(key)][: inputs.needed]
        limit = sampling.zero_variance.dynamic_rounds * sampling.prompts_per_round
        if inputs.drawn >= limit:  # there is no further round
            rest = [key for key in inputs.open if key not in varied]
            varied += rest[: inputs.needed - len(varied)]
        return varied

    def groups_in_flight(self, sampling: SamplingConfig) -> int:
        """Returns a round's groups and those kept from earlier rounds."""
        return sampling.prompts_per_step * (sampling.zero_variance.dynamic_batch + 1)

    def check(self, sampling: SamplingConfig) -> None:
        """Raises ConfigError unless rl.zero_variance.dynamic_sampling is set."""
        check(
            sampling.zero_variance.dynamic_sampling,
            f"{self.key}.name = {self.name!r}: set rl.zero_variance.dynamic_sampling, whose"
            " settings it reads",
        )
