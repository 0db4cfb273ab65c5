"""The advantage of maximum-likelihood reinforcement learning (MaxRL, arXiv 2602.02710)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.config import Advantage
from compass_jax.rl.advantages.inputs import AdvantageInputs
from compass_jax.rl.grouping import UNIFORM_WITHIN, per_row


@dataclass(frozen=True)
class MaxRL(Advantage):
    """The reward against its group's mean, divided by that mean (MaxRL, arXiv 2602.02710):

        A_i = (R_i - mean R) / mean R        for mean R > 0 and min R >= 0, else 0

    A rare success weighs more than a frequent one. Rewards are not negative: with one that is, the
    mean is no pass rate and may be close to 0, so the group has no advantage. Settings that lead to
    negative rewards are refused, and a run reports rewards below 0.
    """

    needs_rewards_from_zero: ClassVar[bool] = True

    def responses(self, inputs: AdvantageInputs) -> Float[Array, "b"]:
        """Returns the advantage of each response."""
        mean = per_row(inputs.statistics.mean, inputs.group)
        low = per_row(inputs.statistics.low, inputs.group)
        defined = (mean > 0) & (low >= -UNIFORM_WITHIN)
        one, zero = jnp.ones_like(mean), jnp.zeros_like(mean)
        return jnp.where(defined, (inputs.reward - mean) / jnp.where(defined, mean, one), zero)
