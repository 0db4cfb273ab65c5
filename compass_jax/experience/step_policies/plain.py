"""The policy of a step's prompts, all samples of which run."""

from __future__ import annotations

from dataclasses import dataclass

from compass_jax.config import SamplingConfig
from compass_jax.config.ranges import Repeat
from compass_jax.experience.step_policies.rounds import InRounds


@dataclass(frozen=True)
class Plain(InRounds):
    """Draws a step's prompts and trains on all their groups; in several rounds further groups
    replace those that do not vary.
    """

    rounds: Repeat = 1
    """Maximum number of rounds of rl.prompts_per_step prompts that a step draws until as many
    groups vary; uniform groups of the last one fill the rest.
    """

    def most_rounds(self, sampling: SamplingConfig) -> int:
        """Returns `rounds`."""
        return self.rounds
