"""IcePop: a mask of single tokens by their ratio."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.config import Correction
from compass_jax.config.correction import check_encloses_one
from compass_jax.config.ranges import Bound
from compass_jax.rl.corrections.inputs import CorrectionInputs


@dataclass(frozen=True)
class IcePop(Correction):
    """IcePop: a token's weight is its ratio inside a range, and 0 outside:

    rho if low <= rho <= high else 0
    """

    ratio_range: tuple[Bound, Bound] = (0.5, 5.0)
    """Range (low, high) of the ratio of training to rollout probabilities that a token may have."""

    def weights(self, inputs: CorrectionInputs) -> Float[Array, "b t"]:
        """Returns the ratio of each token, 0 outside the range."""
        low, high = self.ratio_range
        rho = inputs.ratio
        return jnp.where((rho >= low) & (rho <= high), rho, jnp.zeros((), rho.dtype))

    def validate(self) -> None:
        super().validate()
        check_encloses_one(self.key, self.ratio_range)
