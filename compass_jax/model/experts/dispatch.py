"""Sorts pairs of (token, choice) by expert, by sorting or by counting; and gathers whose transposes
are gathers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Dispatch(NamedTuple):
    """(token, choice) pairs sorted by expert; pair p is choice p % k of token p // k. Pairs of
    masked tokens come last, outside every expert's rows.
    """

    order: Int[Array, "m"]  # the pair in each sorted row
    row: Int[Array, "m"]  # the sorted row of each pair
    sizes: Int[Array, "e"]  # rows of each expert

    def dispatched(self) -> Bool[Array, "m"]:
        """Returns which pairs belong to an expert."""
        return self.row < jnp.sum(self.sizes, dtype=jnp.int32)

    def starts(self) -> Int[Array, "e"]:
        """Returns the sorted row at which each expert begins."""
        return jnp.cumsum(self.sizes, dtype=jnp.int32) - self.sizes

    def expert(self) -> Int[Array, "m"]:
        """Returns the expert of each pair; the last one for pairs of masked tokens."""
        return expert_of_row(self.sizes, self.row)


def expert_of_row(sizes: Int[Array, "e"], row: Int[Array, "m"]) -> Int[Array, "m"]:
    """Returns the expert of sorted rows; the last one after the last group."""
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    return jnp.minimum(
        jnp.sum(row[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), len(sizes) - 1
    )


def sorted_dispatch(expert: Int[Array, "m"], experts: int) -> Dispatch:
    """Sorts pairs by `expert`, stably; the id `experts` means no expert and sorts last."""
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
    """Computes `sorted_dispatch` by counting: running counts of each expert's pairs give each
    pair's row. On a TPU sums are cheap; a sort is slow and takes seconds to compile in every layer.
    """
    m = expert.shape[0]
    is_expert = expert[:, None] == jnp.arange(experts + 1, dtype=expert.dtype)[None, :]
    counts = _running_counts(is_expert)
    sizes = counts[-1]
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    # One column of each row is true: the sum selects the count of the pair's expert.
    row = jnp.sum(jnp.where(is_expert, counts - 1 + starts[None, :], 0), axis=1, dtype=jnp.int32)
    order = jnp.zeros_like(row).at[row].set(jnp.arange(m, dtype=jnp.int32), unique_indices=True)
    return Dispatch(order, row, sizes[:experts])


def _running_counts(is_expert: Bool[Array, "m e"], size: int = 256) -> Int[Array, "m e"]:
    """Computes a cumulative sum over axis 0: within blocks by a product with a triangle (0, 1 and
    counts up to 256 are exact), then over the blocks.
    """
    m, e = is_expert.shape
    blocks = jnp.pad(is_expert, ((0, -m % size), (0, 0))).reshape(-1, size, e).astype(jnp.bfloat16)
    triangle = jnp.tril(jnp.ones((size, size), jnp.bfloat16))
    within = jnp.einsum("ij,bje->bie", triangle, blocks, preferred_element_type=jnp.float32).astype(
        jnp.int32
    )
    block_totals = within[:, -1]
    before = jnp.cumsum(block_totals, axis=0, dtype=jnp.int32) - block_totals
    return (within + before[:, None]).reshape(-1, e)[:m]


def _stable_order(keys: Int[Array, "m"], bound: int) -> Int[Array, "m"]:
    """Returns a stable argsort of keys in [0, bound). One sort of (key, index) packed in an integer
    is three times as fast as a sort of pairs.
    """
    m = keys.shape[0]
    if bound * m > np.iinfo(np.int32).max:
        return jnp.argsort(keys, stable=True).astype(jnp.int32)
    return jnp.sort(keys * m + jnp.arange(m, dtype=jnp.int32)) % m


@jax.custom_vjp
def permute(
    x: Float[Array, "m d"], order: Int[Array, "m"], inverse: Int[Array, "m"]
) -> Float[Array, "m d"]:
    """Returns x[order]; its transpose is a gather too (a scatter-add is many times slower
    on CPU).
    """
    return jnp.take(x, order, axis=0, unique_indices=True, mode="clip")


def _permute_fwd(x, order, inverse):
    return permute(x, order, inverse), (order, inverse)


def _permute_bwd(saved, g):
    _, inverse = saved
    return jnp.take(g, inverse, axis=0, unique_indices=True, mode="clip"), None, None


permute.defvjp(_permute_fwd, _permute_bwd)


@jax.custom_vjp
def repeat_tokens(
    x: Float[Array, "n d"], order: Int[Array, "m"], inverse: Int[Array, "m"]
) -> Float[Array, "m d"]:
    """Repeats each token for its m / n choices, in `order`; the transpose sums a token's choices,
    by a gather too.
    """
    return jnp.take(x, order // (order.shape[0] // x.shape[0]), axis=0, mode="clip")


def _repeat_fwd(x, order, inverse):
    return repeat_tokens(x, order, inverse), (inverse, x.shape[0])


def _repeat_bwd(saved, g):
    inverse, n = saved
    return (
        jnp.take(g, inverse, axis=0, unique_indices=True, mode="clip")
        .reshape(n, -1, g.shape[1])
        .sum(1),
        None,
        None,
    )


repeat_tokens.defvjp(_repeat_fwd, _repeat_bwd)
