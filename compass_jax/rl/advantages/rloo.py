"""REINFORCE leave-one-out (arXiv 2402.14740)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.config import Advantage
from compass_jax.rl.advantages.inputs import AdvantageInputs
from compass_jax.rl.grouping import per_row


@dataclass(frozen=True)
class Rloo(Advantage):
    """The reward against the mean of the group's other responses (RLOO, arXiv 2402.14740, section
    2.4):

        A_i = R_i - mean_{j != i} R_j  =  n / (n - 1) (R_i - mean R)        n known responses
    """

    def responses(self, inputs: AdvantageInputs) -> Float[Array, "b"]:
        """Returns the advantage of each response."""
        stats = inputs.statistics
        # A group of one response gets advantage 0 anyway (group_advantage); 2 avoids a 0 below.
        n = per_row(jnp.maximum(stats.known, 2), inputs.group).astype(inputs.reward.dtype)
        return (inputs.reward - per_row(stats.mean, inputs.group)) * (n / (n - 1))
