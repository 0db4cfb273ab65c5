"""Pairs of (token, choice) in the order of their experts: by sorting, or by counting; and gathers
whose transposes are gathers too.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Dispatch(NamedTuple):
    """(token, choice) pairs sorted by expert; pair p is choice p % k of token p // k. Those of
    masked tokens come last, in no expert's rows.
    """

    order: Int[Array, "m"]  # the pair in each sorted row
    row: Int[Array, "m"]  # the sorted row of each pair
    sizes: Int[Array, "e"]  # rows of each expert

    def dispatched(self) -> Bool[Array, "m"]:
        """Which pairs belong to an expert."""
        return self.row < jnp.sum(self.sizes, dtype=jnp.int32)

    def starts(self) -> Int[Array, "e"]:
        """The sorted row at which each expert begins."""
        return jnp.cumsum(self.sizes, dtype=jnp.int32) - self.sizes

    def expert(self) -> Int[Array, "m"]:
        """The expert of each pair; the last one for pairs of masked tokens."""
        ends = jnp.cumsum(self.sizes, dtype=jnp.int32)
        return jnp.minimum(
            jnp.sum(self.row[:, None] >= ends[None, :], axis=1, dtype=jnp.int32),
            len(self.sizes) - 1,
        )


def sorted_dispatch(expert: Int[Array, "m"], experts: int) -> Dispatch:
    """The pairs of (token, choice) by their `expert`, those of one in their order; the id `experts`
    is none and comes behind.
    """
    order = _stable_order(expert, experts + 1)
    row = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(expert.shape[0], dtype=jnp.int32), unique_indices=True)
    )
    return Dispatch(
        order,
        row,
        jnp.sum(
            expert[:, None] == jnp.arange(experts, dtype=expert.dtype)[None, :],
            axis=0,
            dtype=jnp.int32,
        ),
    )


def counted_dispatch(expert: Int[Array, "m"], experts: int) -> Dispatch:
    """`sorted_dispatch` by counting: running counts of each expert's pairs say where each pair
    goes. On a TPU sums are cheap; a sort is slow, and takes its compiler seconds in every layer."""
    m = expert.shape[0]
    here = expert[:, None] == jnp.arange(experts + 1, dtype=expert.dtype)[None, :]
    counts = _running_counts(here)
    sizes = counts[-1]
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    row = jnp.sum(jnp.where(here, counts - 1 + starts[None, :], 0), axis=1, dtype=jnp.int32)
    order = jnp.zeros_like(row).at[row].set(jnp.arange(m, dtype=jnp.int32), unique_indices=True)
    return Dispatch(order, row, sizes[:experts])


def _running_counts(here: Bool[Array, "m e"], size: int = 256) -> Int[Array, "m e"]:
    """Cumulative sum over axis 0: within blocks a product with a triangle (0, 1 and counts up to
    256 are exact), then over the blocks.
    """
    m, e = here.shape
    blocks = jnp.pad(here, ((0, -m % size), (0, 0))).reshape(-1, size, e).astype(jnp.bfloat16)
    triangle = jnp.tril(jnp.ones((size, size), jnp.bfloat16))
    within = jnp.einsum("ij,bje->bie", triangle, blocks, preferred_element_type=jnp.float32).astype(
        jnp.int32
    )
    whole = within[:, -1]
    before = jnp.cumsum(whole, axis=0, dtype=jnp.int32) - whole
    return (within + before[:, None]).reshape(-1, e)[:m]


def _stable_order(keys: Int[Array, "m"], bound: int) -> Int[Array, "m"]:
    """argsort of keys in [0, bound), ties in their order. One sort of (key, index) in an integer is
    three times faster than a sort of pairs.
    """
    m = keys.shape[0]
    if bound * m > np.iinfo(np.int32).max:
        return jnp.argsort(keys, stable=True).astype(jnp.int32)
    return jnp.sort(keys * m + jnp.arange(m, dtype=jnp.int32)) % m


@jax.custom_vjp
def permute(
    x: Float[Array, "m d"], order: Int[Array, "m"], inverse: Int[Array, "m"]
) -> Float[Array, "m d"]:
    """x[order]; its transpose is a gather too (a scatter-add is many times slower on CPU)."""
    return jnp.take(x, order, axis=0, unique_indices=True, mode="clip")


def _permute_fwd(x, order, inverse):
    return permute(x, order, inverse), (order, inverse)


def _permute_bwd(saved, g):
    _, inverse = saved
    return jnp.take(g, inverse, axis=0, unique_indices=True, mode="clip"), None, None


permute.defvjp(_permute_fwd, _permute_bwd)


@jax.custom_vjp
def spread(
    x: Float[Array, "n d"], order: Int[Array, "m"], inverse: Int[Array, "m"]
) -> Float[Array, "m d"]:
    """Each token once for each of its m / n choices, the choices in `order`; the transpose sums a
    token's, by a gather too.
    """
    return jnp.take(x, order // (order.shape[0] // x.shape[0]), axis=0, mode="clip")


def _spread_fwd(x, order, inverse):
    return spread(x, order, inverse), (inverse, x.shape[0])


def _spread_bwd(saved, g):
    inverse, n = saved
    return (
        jnp.take(g, inverse, axis=0, unique_indices=True, mode="clip")
        .reshape(n, -1, g.shape[1])
        .sum(1),
        None,
        None,
    )


spread.defvjp(_spread_fwd, _spread_bwd)
