"""A mask of whole responses by the geometric mean of their tokens' ratios."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.base.masked import masked_mean
from compass_jax.config import Correction
from compass_jax.config.correction import check_encloses_one
from compass_jax.config.ranges import Bound
from compass_jax.rl.corrections.inputs import CorrectionInputs


@dataclass(frozen=True)
class SequenceMask(Correction):
    """A mask of responses: a token's weight is its ratio, or 0 where the response's mean ratio
    leaves a range:

    rho if low <= geometric mean of the response's rho <= high, else 0 for the whole response
    """

    ratio_range: tuple[Bound, Bound] = (0.999, 1.002)
    """Range (low, high) of the geometric mean of a response's ratios of training to rollout."""

    def weights(self, inputs: CorrectionInputs) -> Float[Array, "b t"]:
        """Returns the ratio of each token, 0 in responses outside the range."""
        low, high = self.ratio_range
        mean = jnp.exp(masked_mean(inputs.log_ratio, inputs.mask, axis=1, keepdims=True))
        inside = (mean >= low) & (mean <= high)
        return jnp.where(inside, inputs.ratio, jnp.zeros((), inputs.ratio.dtype))

    def validate(self) -> None:
        super().validate()
        check_encloses_one(self.key, self.ratio_range)
