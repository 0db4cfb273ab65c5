"""Truncated importance sampling (TIS)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.config import Correction
from compass_jax.config.ranges import Range
from compass_jax.rl.corrections.inputs import CorrectionInputs


@dataclass(frozen=True)
class Tis(Correction):
    """Truncated importance sampling: a token's weight is its ratio, cut at a bound:

    min(rho, cap)
    """

    cap: Annotated[float, Range(1, 1e6, note="below, on-policy tokens are scaled down")] = 2.0
    """Upper bound of the ratio of training to rollout probabilities (5 in arXiv 2512.01374)."""

    def weights(self, inputs: CorrectionInputs) -> Float[Array, "b t"]:
        """Returns the truncated ratio of each token."""
        return jnp.minimum(inputs.ratio, jnp.array(self.cap, inputs.ratio.dtype))
