"""The precision rule: norms, softmax, router, log-probs and the LM head compute in at least
float32.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def at_least_float32(dtype) -> np.dtype:
    """Returns float32 for narrower floats; float32 and float64 are returned unchanged
    (`jnp.promote_types` refuses to mix types under strict promotion).
    """
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)
