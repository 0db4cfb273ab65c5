"""The advantage of single-stream policy optimisation (SPO, arXiv 2509.13232)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Array, Float

from compass_jax.config import Advantage
from compass_jax.rl.advantages.inputs import AdvantageInputs
from compass_jax.rl.advantages.prediction import of_equal_samples, predicted_reward


@dataclass(frozen=True)
class Predicted(Advantage):
    """The reward against the prompt's predicted one (SPO, arXiv 2509.13232):

        D_i = R_i - q,    q = wrong_at + p (right_at - wrong_at)
        A_i = (D_i - mean D) / (std D + 1e-4 (right_at - wrong_at))     over the update, ddof 0

    p is the mean of the pass rate's distribution that rl.zero_variance.posterior predicted when the
    prompt was drawn. It has seen none of these rewards, so that D is an unbiased advantage: the
    expected sum of D_i grad log pi_i over a group of n is n grad E[R]. Subtracting the mean of N
    rewards adds a bias of the order 1 / N.

    A group of equal rewards teaches by its surprise, and so does a single known reward. Penalties
    of rl.shaping count as reward below the prediction, which is of the raw reward. Each sample of
    an update weighs the same, also where screening or growth makes groups of several sizes: then
    the expected gradient of a prompt is w(p) grad E[R] with w(p) > 0 (Shrunk has the formula).
    """

    reads_prediction: ClassVar[bool] = True

    normalise: bool = True
    """Subtract the mean over the update and divide by its standard deviation."""

    @property
    def uniform_teaches(self) -> bool:
        """Whether values of uniform groups are used: always."""
        return True

    def responses(self, inputs: AdvantageInputs) -> Float[Array, "b"]:
        """Returns the advantage of each response."""
        difference = inputs.reward - predicted_reward(inputs)
        return of_equal_samples(difference, inputs, normalise=self.normalise)
