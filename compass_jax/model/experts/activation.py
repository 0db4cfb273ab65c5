"""The gated activation of an expert: SwiGLU, or gpt-oss's clipped form of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_ALPHA = 1.702  # gpt-oss's gain of the sigmoid


def swiglu(a: Float[Array, "*n f"], u: Float[Array, "*n f"], limit: float) -> Float[Array, "*n f"]:
    """Computes silu(a) u; with a limit a sigmoid(1.702 a) (u + 1), with a clipped from above and u
    from both sides.
    """
    if not limit:
        return jax.nn.silu(a) * u
    a, u = jnp.minimum(a, limit), jnp.clip(u, -limit, limit)
    return a * jax.nn.sigmoid(_ALPHA * a) * (u + 1)


def swiglu_pullback(
    a: Float[Array, "*n f"], u: Float[Array, "*n f"], d_h: Float[Array, "*n f"], limit: float
) -> tuple[Float[Array, "*n f"], Float[Array, "*n f"], Float[Array, "*n f"]]:
    """Returns `swiglu(a, u)` and the gradients of a and u, where d_h is that of the result."""
    if not limit:
        s = jax.nn.sigmoid(a)
        return a * s * u, d_h * u * s * (1 + a * (1 - s)), d_h * a * s
    low, clipped = jnp.minimum(a, limit), jnp.clip(u, -limit, limit)
    s = jax.nn.sigmoid(_ALPHA * low)
    d_a = d_h * (clipped + 1) * s * (1 + _ALPHA * low * (1 - s))
    zero = jnp.zeros((), a.dtype)
    return (
        low * s * (clipped + 1),
        jnp.where(a <= limit, d_a, zero),
        jnp.where(jnp.abs(u) <= limit, d_h * low * s, zero),
    )
