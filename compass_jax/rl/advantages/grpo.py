"""GRPO's advantage (arXiv 2402.03300), with and without the division (Dr.GRPO, 2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float

from compass_jax.config import Advantage
from compass_jax.rl.advantages.inputs import AdvantageInputs
from compass_jax.rl.grouping import per_row

STD_EPSILON = 1e-6


@dataclass(frozen=True)
class GrpoAdvantage(Advantage):
    """The reward against its group's mean, in standard deviations of the group (arXiv 2402.03300,
    section 4.1.2):

        A_i = (R_i - mean R) / (std R + 1e-6)        std with ddof 0

    without the division where `divide_by_std` is off, or the objective is Dr.GRPO (2503.20783).
    """

    divide_by_std: bool = True
    """Advantages are divided by the standard deviation of their group's rewards; dr_grpo never
    does.
    """

    def responses(self, inputs: AdvantageInputs) -> Float[Array, "b"]:
        """Returns the advantage of each response."""
        stats = inputs.statistics
        difference = inputs.reward - per_row(stats.mean, inputs.group)
        if not (self.divide_by_std and inputs.divides_by_std):
            return difference
        return difference / (per_row(stats.std, inputs.group) + STD_EPSILON)
