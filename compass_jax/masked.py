"""Statistics under a mask. The only place that decides what 0/0 is: an empty selection gives 0."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_sum(x: Float[Array, "..."], mask: Bool[Array, "..."], axis=None, keepdims: bool = False) -> Float[Array, "..."]:
    """Sum of `x` where `mask`; values outside the mask may be NaN."""
    return jnp.sum(jnp.where(mask, x, jnp.zeros((), x.dtype)), axis=axis, keepdims=keepdims)


def masked_mean(x: Float[Array, "..."], mask: Bool[Array, "..."], axis=None, keepdims: bool = False) -> Float[Array, "..."]:
    """Mean of `x` where `mask`; 0 where nothing is selected."""
    count = jnp.sum(mask, axis=axis, keepdims=keepdims).astype(x.dtype)
    return masked_sum(x, mask, axis, keepdims) / jnp.maximum(count, jnp.ones((), x.dtype))


def masked_std(x: Float[Array, "..."], mask: Bool[Array, "..."], axis=None, keepdims: bool = False) -> Float[Array, "..."]:
    """Standard deviation with ddof 0 where `mask`; 0 where nothing is selected."""
    mean = masked_mean(x, mask, axis, keepdims=True)
    var = masked_mean(jnp.square(jnp.where(mask, x - mean, jnp.zeros((), x.dtype))), mask, axis, keepdims)
    return jnp.sqrt(var)


def masked_max(x: Float[Array, "..."], mask: Bool[Array, "..."], axis=None, keepdims: bool = False) -> Float[Array, "..."]:
    """Maximum of `x` where `mask`; 0 where nothing is selected."""
    low = jnp.full((), jnp.finfo(x.dtype).min, x.dtype)
    top = jnp.max(jnp.where(mask, x, low), axis=axis, keepdims=keepdims, initial=low)
    return jnp.where(jnp.any(mask, axis=axis, keepdims=keepdims), top, jnp.zeros((), x.dtype))


def masked_min(x: Float[Array, "..."], mask: Bool[Array, "..."], axis=None, keepdims: bool = False) -> Float[Array, "..."]:
    """Minimum of `x` where `mask`; 0 where nothing is selected."""
    return -masked_max(-x, mask, axis, keepdims)
