"""The inputs of a correction."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class CorrectionInputs(NamedTuple):
    """The tokens of one update, one response a row, without gradient."""

    log_ratio: Float[Array, "b t"]  # log(p_training / p_rollout), clamped to +-20; 0 off the mask
    mask: Bool[Array, "b t"]

    @property
    def ratio(self) -> Float[Array, "b t"]:
        """rho = p_training / p_rollout of each token."""
        return jnp.exp(self.log_ratio)
