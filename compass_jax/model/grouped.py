"""SwiGLU of rows sorted by expert, for CPU: groups padded to blocks and multiplied as one batched matmul.

XLA's ragged_dot is a masked dense product there (5 to 15 GFLOP/s where a batched matmul reaches 250). A layout says how
rows are put into blocks of one height, and is picked at run time (`lax.switch`) as the first that holds every group, so
nothing is ever dropped:

- one block per expert, as high as the fullest group: the weights are used where they lie;
- many blocks, each with a copy of its expert's weights: for skewed loads, where one height for all would be mostly padding.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_FEW_ROWS = 4096  # up to this many padded rows, padding costs less than copying weights


class Layout(NamedTuple):
    """`height` rows per block; `blocks` in all, or None for one block per expert."""

    height: int
    blocks: int | None = None


class _Blocks(NamedTuple):
    row: Int[Array, "n h"]  # sorted row in each place of each block
    filled: Bool[Array, "n h 1"]
    place: Int[Array, "m"]  # flat place of each sorted row
    owner: Int[Array, "n"] | None  # expert of each block; None: block i is expert i's


def layouts(tokens: int, top_k: int, experts: int) -> tuple[Layout, ...]:
    """Layouts to choose from, lowest first; the last one holds any load (an expert gets at most every token once)."""
    rows = tokens * top_k
    mean = rows / experts
    few = tokens * experts <= _FEW_ROWS
    heights = sorted({8 * math.ceil(mean * factor / 8) for factor in ((1.0, 1.5, 2.0, 3.0) if few else (1.0, 1.125, 1.25, 1.5, 1.75))})
    single = [Layout(h) for h in heights if h < tokens]
    if few:
        return (*single, Layout(tokens))
    height = max(8, min(256, 2 ** round(math.log2(mean / 4))))
    return (*single, Layout(height, -(-rows // height) + experts))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def padded_swiglu(
    rows: Float[Array, "m d"],
    gate: Float[Array, "e d f"],
    up: Float[Array, "e d f"],
    down: Float[Array, "e f d"],
    sizes: Int[Array, "e"],
    choices: tuple[Layout, ...],
) -> Float[Array, "m d"]:
    """SwiGLU of each row with its group's expert. Rows past sum(sizes) are undefined.

    The backward pass picks the layout again and recomputes, because residuals of a shape known only at run time cannot be kept.
    """

    def branch(layout: Layout, rows, gate, up, down, sizes):
        blocks = _arrange(sizes, layout, rows.shape[0])
        weights = [_owned(w, blocks.owner) for w in (gate, up, down)]
        return _collect(_swiglu(_fill(rows, blocks), *weights), blocks)

    return _first_that_holds(branch, choices, sizes, rows, gate, up, down, sizes)


def _padded_fwd(rows, gate, up, down, sizes, choices):
    return padded_swiglu(rows, gate, up, down, sizes, choices), (rows, gate, up, down, sizes)


def _padded_bwd(choices, saved, g):
    def branch(layout: Layout, g, rows, gate, up, down, sizes):
        blocks = _arrange(sizes, layout, rows.shape[0])
        weights = [_owned(w, blocks.owner) for w in (gate, up, down)]
        _, pullback = jax.vjp(_swiglu, _fill(rows, blocks), *weights)
        d_rows, *d_weights = pullback(_fill(g, blocks))
        return _collect(d_rows, blocks), *(_sum_by_owner(w, blocks.owner, sizes.shape[0]) for w in d_weights)

    return *_first_that_holds(branch, choices, saved[-1], g, *saved), None


padded_swiglu.defvjp(_padded_fwd, _padded_bwd)


def _swiglu(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def _first_that_holds(branch, choices: tuple[Layout, ...], sizes, *args):
    """Runs `branch` with the first layout whose blocks hold the fullest group; the last holds any."""
    heights = jnp.array([layout.height for layout in choices[:-1]], sizes.dtype)
    choice = jnp.sum(jnp.max(sizes) > heights, dtype=jnp.int32)
    return jax.lax.switch(choice, [partial(branch, layout) for layout in choices], *args)


def _arrange(sizes: Int[Array, "e"], layout: Layout, m: int) -> _Blocks:
    """Places `m` sorted rows, of which sum(sizes) belong to a group, in the layout's blocks."""
    height = layout.height
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    offset = jnp.arange(height, dtype=jnp.int32)[None, :]
    index = jnp.arange(m, dtype=jnp.int32)
    expert = jnp.sum(index[:, None] >= ends[None, :-1], axis=1, dtype=jnp.int32)
    within = index - jnp.take(starts, expert)
    if layout.blocks is None:
        return _Blocks(starts[:, None] + offset, (offset < sizes[:, None])[..., None], expert * height + within, None)
    needed = (sizes + height - 1) // height
    block_ends = jnp.cumsum(needed, dtype=jnp.int32)
    first = block_ends - needed
    block = jnp.arange(layout.blocks, dtype=jnp.int32)
    owner = jnp.minimum(jnp.sum(block[:, None] >= block_ends[None, :], axis=1, dtype=jnp.int32), sizes.shape[0] - 1)
    row = (jnp.take(starts, owner) + (block - jnp.take(first, owner)) * height)[:, None] + offset
    filled = (row < jnp.take(ends, owner)[:, None])[..., None]
    return _Blocks(row, filled, jnp.take(first, expert) * height + within, owner)


def _fill(rows: Float[Array, "m d"], blocks: _Blocks) -> Float[Array, "n h d"]:
    return jnp.where(blocks.filled, jnp.take(rows, blocks.row, axis=0, mode="clip"), jnp.zeros((), rows.dtype))


def _collect(out: Float[Array, "n h d"], blocks: _Blocks) -> Float[Array, "m d"]:
    return jnp.take(out.reshape(-1, out.shape[-1]), blocks.place, axis=0, mode="clip")


def _owned(weights: Float[Array, "e i o"], owner) -> Float[Array, "n i o"]:
    return weights if owner is None else jnp.take(weights, owner, axis=0, mode="clip")


def _sum_by_owner(d_weights: Float[Array, "n i o"], owner, experts: int) -> Float[Array, "e i o"]:
    """Adds the gradients of an expert's blocks, as a small matmul (a scatter-add is slow on CPU)."""
    if owner is None:
        return d_weights
    member = (jnp.arange(experts, dtype=owner.dtype)[:, None] == owner[None, :]).astype(d_weights.dtype)
    return jnp.einsum("en,nio->eio", member, d_weights)
