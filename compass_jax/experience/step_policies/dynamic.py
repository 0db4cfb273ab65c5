"""DAPO's dynamic sampling (arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from compass_jax.config import SamplingConfig
from compass_jax.config.errors import check
from compass_jax.experience.step_policies.rounds import InRounds


@dataclass(frozen=True)
class DynamicSampling(InRounds):
    """Draws at most dynamic_rounds rounds of dynamic_batch * prompts_per_step prompts. Its settings
    are those of rl.zero_variance.
    """

    def prompts_per_round(self, sampling: SamplingConfig) -> int:
        """Returns dynamic_batch * prompts_per_step."""
        return sampling.prompts_per_step * sampling.zero_variance.dynamic_batch

    def most_rounds(self, sampling: SamplingConfig) -> int:
        """Returns dynamic_rounds."""
        return sampling.zero_variance.dynamic_rounds

    def check(self, sampling: SamplingConfig) -> None:
        """Raises ConfigError unless rl.zero_variance.dynamic_sampling is set."""
        check(
            sampling.zero_variance.dynamic_sampling,
            f"{self.key}.name = {self.name!r}: set rl.zero_variance.dynamic_sampling, whose"
            " settings it reads",
        )
