"""Leave-one-out baselines that are shrunk to a prediction (after arXiv 2511.03710)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.base.records import CONCENTRATION, FIRST
from compass_jax.config import Advantage
from compass_jax.config.ranges import Range
from compass_jax.rl.advantages.inputs import AdvantageInputs
from compass_jax.rl.advantages.prediction import (
    float_column,
    of_equal_samples,
    predicted_reward,
)
from compass_jax.rl.grouping import group_sum, per_row


@dataclass(frozen=True)
class Shrunk(Advantage):
    """The reward against a baseline between those of the group and of the prediction (shrinkage
    after arXiv 2511.03710, leave-one-out):

        D_i = R_i - (sum_{j in J} R_j + kappa q) / (|J| + kappa)
        J = the other known samples of the group's first round
        q = wrong_at + p (right_at - wrong_at),    kappa = strength * concentration
        A_i = (D_i - mean D) / (std D + 1e-4 (right_at - wrong_at))     over the update, ddof 0

    p and concentration are those of the Beta distribution of the pass rate that
    rl.zero_variance.posterior predicted when the prompt was drawn. kappa = 0 is RLOO, kappa =
    infinity R - q (Predicted). A sample's own reward is not in its baseline, so that D is an
    unbiased advantage: the expected sum of D_i grad log pi_i over a group of n is n grad E[R].

    Where whether the group has more samples depends on the rewards of the first round (screening,
    growth), the first n0 samples take their baselines from each other, later ones from all of the
    first n0, and each sample weighs the same. The expected gradient of a prompt is then

        w(p) grad E[R],    w(p) = (n0 + E[number of later samples]) / rl.group_size > 0

    up to the centring, whose bias is of the order 1 / N for N rewards of the update. Baselines
    differ within such a group, so that a better answer can have a lower advantage where rewards are
    not 0 and 1 (`advantage/inversion_frac`).

    A group of equal rewards teaches by its surprise, which goes to 0 as the prediction becomes
    sure, and so does a single known reward. Penalties of rl.shaping count as reward below the
    prediction, which is of the raw reward.
    """

    reads_prediction: ClassVar[bool] = True

    strength: Annotated[float, Range(0, 1e6)] = 1.0
    """Weight of the prediction, in times its concentration (alpha + beta, in samples); 0: RLOO."""
    normalise: bool = True
    """Subtract the mean over the update and divide by its standard deviation."""

    @property
    def uniform_teaches(self) -> bool:
        """Whether the prediction has a weight: without it, equal rewards have no surprise."""
        return self.strength > 0

    def responses(self, inputs: AdvantageInputs) -> Float[Array, "b"]:
        """Returns the advantage of each response."""
        reward, zero = inputs.reward, jnp.zeros_like(inputs.reward)
        first = inputs.known & inputs.columns.get(FIRST, jnp.ones_like(inputs.known))
        # The number and the sum of the rewards in J.
        count, total = (
            per_row(group_sum(x, inputs.group, inputs.n_groups), inputs.group) - x
            for x in (first.astype(reward.dtype), jnp.where(first, reward, zero))
        )
        kappa = self.strength * float_column(inputs, CONCENTRATION)
        # Not (total + kappa q) / (count + kappa), which is undefined for an infinite kappa.
        prediction, has_baseline = predicted_reward(inputs), count + kappa > 0
        share = count / jnp.where(has_baseline, count + kappa, jnp.ones_like(kappa))
        baseline = prediction + share * (total / jnp.maximum(count, 1) - prediction)
        difference = jnp.where(has_baseline, reward - baseline, zero)
        return of_equal_samples(difference, inputs, normalise=self.normalise)
