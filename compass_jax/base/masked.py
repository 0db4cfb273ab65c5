"""Statistics under a mask. An empty selection gives 0 everywhere in the package."""

from __future__ import annotations

from fractions import Fraction

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_sum(
    x: Float[Array, "..."], mask: Bool[Array, "..."], axis=None, keepdims: bool = False
) -> Float[Array, "..."]:
    """Computes the sum of `x` where `mask`; values outside the mask may be NaN."""
    # A product with the mask would keep NaN: NaN * 0 is NaN.
    return jnp.sum(jnp.where(mask, x, jnp.zeros((), x.dtype)), axis=axis, keepdims=keepdims)


def masked_mean(
    x: Float[Array, "..."], mask: Bool[Array, "..."], axis=None, keepdims: bool = False
) -> Float[Array, "..."]:
    """Computes the mean of `x` where `mask`; 0 for an empty selection."""
    count = jnp.sum(mask, axis=axis, keepdims=keepdims).astype(x.dtype)
    return masked_sum(x, mask, axis, keepdims) / jnp.maximum(count, jnp.ones((), x.dtype))


def masked_max(
    x: Float[Array, "..."], mask: Bool[Array, "..."], axis=None, keepdims: bool = False
) -> Float[Array, "..."]:
    """Computes the maximum of `x` where `mask`; 0 for an empty selection."""
    low = jnp.full((), jnp.finfo(x.dtype).min, x.dtype)
    # `initial` gives an axis of size 0 a maximum; jnp.max raises for one otherwise.
    top = jnp.max(jnp.where(mask, x, low), axis=axis, keepdims=keepdims, initial=low)
    return jnp.where(jnp.any(mask, axis=axis, keepdims=keepdims), top, jnp.zeros((), x.dtype))


def masked_quantile(
    x: Float[Array, "b t"], mask: Bool[Array, "b t"], q: float
) -> Float[Array, "b"]:
    """Computes the `q` quantile of each row where `mask`, linearly interpolated (numpy's `linear`);
    0 for an empty row.

    `q` is rounded to the nearest fraction with a denominator up to 10,000, and the position q (n -
    1) is computed in integers. Where the position is an integer, the quantile equals that value
    exactly in every precision, so that `x >= quantile` holds for it.
    """
    if not 0 <= q <= 1:
        raise ValueError(f"masked_quantile: q = {q} is outside [0, 1]")
    fraction = Fraction(q).limit_denominator(10_000)
    top, bottom = fraction.numerator, fraction.denominator
    last = jnp.maximum(jnp.sum(mask, axis=1, dtype=jnp.int32) - 1, 0)
    # q * last = below + remainder / bottom, without the overflow of top * last
    remainder = last % bottom * top
    below = last // bottom * top + remainder // bottom
    above = jnp.minimum(below + 1, last)
    # Values outside the mask sort to the end, behind the index `last`.
    ordered = jnp.sort(jnp.where(mask, x, jnp.full((), jnp.inf, x.dtype)), axis=1)
    low, high = (jnp.take_along_axis(ordered, i[:, None], axis=1)[:, 0] for i in (below, above))
    share = (remainder % bottom).astype(x.dtype) / bottom
    # Rounding must not lift the result above `high`.
    between = jnp.minimum(low + (high - low) * share, high)
    return jnp.where(jnp.any(mask, axis=1), between, jnp.zeros((), x.dtype))
