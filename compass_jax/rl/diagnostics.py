"""Diagnostics of micro-batches: a dict of name -> tuple of scalars, merged by addition, divided
once at the end.

    (numerator, denominator)        a mean; 0/0 is 0
    (value, 1), name ends in _max   a maximum; merged by max
    (total,)                        a total
    (sum w, sum w^2, n)             the effective sample size of the weights w as a share of n: (sum
                                    w)^2 / (n sum w^2)

Averaging finished numbers instead would let a micro-batch of three tokens count as much as one of
thirty thousand.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from compass_jax.base.masked import masked_sum

Diagnostics = dict[str, tuple[Float[Array, ""], ...]]


def mean_of(
    x: Float[Array, "..."], mask: Bool[Array, "..."]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns (sum of `x` where `mask`, number of selected entries), without gradient."""
    return jax.lax.stop_gradient(masked_sum(x, mask)), jnp.sum(mask).astype(x.dtype)


def share_of(
    part: Bool[Array, "..."], mask: Bool[Array, "..."], dtype=jnp.float32
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns (number of entries in both `part` and `mask`, number in `mask`)."""
    return jnp.sum(part & mask).astype(dtype), jnp.sum(mask).astype(dtype)


def merge_diagnostics(parts: Sequence[Diagnostics]) -> Diagnostics:
    """Returns the diagnostics of all `parts` together; a name that only some parts report is merged
    over those parts.
    """
    merged: Diagnostics = {}
    for part in parts:
        for name, new in part.items():
            if name not in merged:
                merged[name] = tuple(new)
            elif name.endswith("_max"):
                merged[name] = (jnp.maximum(merged[name][0], new[0]), new[1])
            else:
                merged[name] = tuple(a + b for a, b in zip(merged[name], new, strict=True))
    return merged


def finalize_diagnostics(diagnostics: Diagnostics) -> dict[str, Float[Array, ""]]:
    """Returns name -> number. Raises ValueError for a tuple of a length that the module does not
    list.
    """
    return {name: _finish(name, *parts) for name, parts in diagnostics.items()}


def _finish(name: str, *parts: Float[Array, ""]) -> Float[Array, ""]:
    if len(parts) == 1 or name.endswith("_max"):
        return parts[0]
    if len(parts) == 2:
        return _ratio(*parts)
    if len(parts) == 3:
        total, squares, n = parts
        return _ratio(total * total, n * squares)
    raise ValueError(
        f"diagnostic {name!r} has {len(parts)} parts: 1 (total), 2 (numerator, denominator) or 3"
        " (sum, sum of squares, n) are known"
    )


def _ratio(numerator: Float[Array, ""], denominator: Float[Array, ""]) -> Float[Array, ""]:
    nonzero = denominator != 0
    return jnp.where(
        nonzero,
        numerator / jnp.where(nonzero, denominator, jnp.ones_like(denominator)),
        jnp.zeros_like(numerator),
    )
