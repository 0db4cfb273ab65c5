"""REINFORCE++ with the group's mean as baseline (arXiv 2501.03262)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.base.masked import masked_mean
from compass_jax.config import Advantage
from compass_jax.rl.advantages.inputs import AdvantageInputs
from compass_jax.rl.grouping import per_row

STD_EPSILON = 1e-6


@dataclass(frozen=True)
class ReinforcePlusPlus(Advantage):
    """The reward against its group's mean, in standard deviations over the whole update
    (REINFORCE++-baseline, arXiv 2501.03262):

        D_i = R_i - mean_group R,    A_i = D_i / (std_update D + 1e-6)        std with ddof 0

    The standard deviation is over all known responses of the update, those of uniform groups
    included. The mean of D is 0 by construction and is not subtracted again.
    """

    def responses(self, inputs: AdvantageInputs) -> Float[Array, "b"]:
        """Returns the advantage of each response."""
        mean = per_row(inputs.statistics.mean, inputs.group)
        difference = jnp.where(inputs.known, inputs.reward - mean, jnp.zeros_like(mean))
        variance = masked_mean(jnp.square(difference), inputs.known)
        return difference / (jnp.sqrt(variance) + STD_EPSILON)
