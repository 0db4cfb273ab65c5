"""No correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.config import Correction
from compass_jax.rl.corrections.inputs import CorrectionInputs


@dataclass(frozen=True)
class NoCorrection(Correction):
    """No correction: every token has weight 1."""

    acts: ClassVar[bool] = False

    def weights(self, inputs: CorrectionInputs) -> Float[Array, "b t"]:
        """Returns 1 for each token."""
        return jnp.ones_like(inputs.log_ratio)
