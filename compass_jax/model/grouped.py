"""Grouped SwiGLU for CPU: each expert's rows in one padded block of a batched matmul, what does not fit in a loop behind it.

XLA's `ragged_dot` is a dense product over all experts on CPU. Here every expert gets a block of `height` rows, which is
close to the mean load, so that balanced experts run as one batched matmul. The rows of an expert beyond its block are
worked off by a loop over smaller blocks, as many as there are: nothing is ever dropped. A skewed load costs the blocks
that stay empty, and the loop, whose products are slower than the batched ones.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Dispatch(NamedTuple):
    """(token, choice) pairs sorted by expert; pair p is choice p % k of token p // k. Those of masked tokens come last, in no expert's rows."""

    order: Int[Array, "m"]  # the pair in each sorted row
    row: Int[Array, "m"]  # the sorted row of each pair
    sizes: Int[Array, "e"]  # rows of each expert


class _Blocks(NamedTuple):
    """Where the rows of the batched blocks come from and go to."""

    pair: Int[Array, "e h"]
    filled: Bool[Array, "e h"]
    place: Int[Array, "m"]  # of each pair: its flat place in the blocks; any place for a pair that is in none


def block_heights(pairs: int, experts: int) -> tuple[int, int]:
    """Rows of an expert's block, and of a block of the loop behind it.

    Few rows (decoding): two standard deviations of an even load above the mean, since a turn of the loop reads an
    expert's weights once more for a row or two. Many rows: the mean, since empty rows cost as much as the loop.
    """
    mean = pairs / experts
    height = 32 * round(mean / 32) if mean >= 128 else 8 * math.ceil((mean + 2 * math.sqrt(mean)) / 8)
    return height, min(128, max(8, height // 4 // 8 * 8))


def grouped_swiglu(x: Float[Array, "n d"], weights: dict[str, Float[Array, "e ..."]], dispatch: Dispatch, k: int) -> Float[Array, "m d"]:
    """SwiGLU of each (token, choice) pair with its expert, in the order of the pairs; `k` choices a token. Pairs of masked tokens give 0.

    `weights`: gate and up `[e d f]`, or both side by side as gate_up `[e d 2f]` (one wider product; not differentiable); down `[e f d]`.
    """
    down = weights["down"]
    height, extra = block_heights(dispatch.order.shape[0], down.shape[0])
    height = min(height, x.shape[0])
    if "gate_up" in weights:
        return _blocked((weights["gate_up"],), down, x, dispatch, k, height, extra)[0]
    return blocked_swiglu(x, weights["gate"], weights["up"], down, dispatch, k, height, extra)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def blocked_swiglu(x, gate, up, down, dispatch: Dispatch, k: int, height: int, extra: int) -> Float[Array, "m d"]:
    """`grouped_swiglu` with blocks of `height` rows, and of `extra` rows for what does not fit in them."""
    return _blocked((gate, up), down, x, dispatch, k, height, extra)[0]


def _blocked(into: tuple[Array, ...], down, x, dispatch: Dispatch, k: int, height: int, extra: int):
    """(output of every pair, the blocks' gate and up projections)."""
    blocks = _arrange(dispatch, height)
    a, u = _gate_and_up(_rows(x, blocks.pair // k, blocks.filled), into)
    out = _rows(_flat((jax.nn.silu(a) * u) @ down), blocks.place, _dispatched(dispatch))

    def body(expert, pairs, filled, out):
        a, u = _gate_and_up(_rows(x, pairs // k, filled), [w[expert] for w in into])
        return _put(out, pairs, filled, (jax.nn.silu(a) * u) @ down[expert])

    return _over_the_rest(dispatch, height, extra, body, out), a, u


def _gate_and_up(rows, into):
    return [rows @ w for w in into] if len(into) == 2 else jnp.split(rows @ into[0], 2, axis=-1)


def _blocked_fwd(x, gate, up, down, dispatch, k: int, height: int, extra: int):
    out, a, u = _blocked((gate, up), down, x, dispatch, k, height, extra)
    return out, (x, gate, up, down, dispatch, a, u)


def _blocked_bwd(k: int, height: int, extra: int, saved, g):
    x, gate, up, down, dispatch, a, u = saved
    blocks = _arrange(dispatch, height)

    def pull(x, a, u, g, gate, up, down):
        """Gradients of (x, gate, up, down) for rows of one block."""
        s = jax.nn.sigmoid(a)
        d_h = g @ jnp.swapaxes(down, -1, -2)
        d_a, d_u = d_h * u * s * (1 + a * (1 - s)), d_h * a * s
        d_x = d_a @ jnp.swapaxes(gate, -1, -2) + d_u @ jnp.swapaxes(up, -1, -2)
        x, h = jnp.swapaxes(x, -1, -2), jnp.swapaxes(a * s * u, -1, -2)
        return d_x, x @ d_a, x @ d_u, h @ g

    d_rows, *d_weights = pull(_rows(x, blocks.pair // k, blocks.filled), a, u, _rows(g, blocks.pair, blocks.filled), gate, up, down)

    def body(expert, pairs, filled, carry):
        d_pairs, *d_weights = carry
        part, weights = _rows(x, pairs // k, filled), (gate[expert], up[expert], down[expert])
        d_part, *d_own = pull(part, part @ weights[0], part @ weights[1], _rows(g, pairs, filled), *weights)
        return _put(d_pairs, pairs, filled, d_part), *(total.at[expert].add(d) for total, d in zip(d_weights, d_own, strict=True))

    start = _rows(_flat(d_rows), blocks.place, _dispatched(dispatch))
    d_pairs, *d_weights = _over_the_rest(dispatch, height, extra, body, (start, *d_weights))
    return jnp.sum(d_pairs.reshape(-1, k, d_pairs.shape[1]), axis=1), *d_weights, None


blocked_swiglu.defvjp(_blocked_fwd, _blocked_bwd)


def _arrange(dispatch: Dispatch, height: int) -> _Blocks:
    order, row, sizes = dispatch
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts, offset = ends - sizes, jnp.arange(height, dtype=jnp.int32)[None, :]
    pair = jnp.take(order, starts[:, None] + offset, mode="clip")
    expert = jnp.minimum(jnp.sum(row[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), len(sizes) - 1)
    return _Blocks(pair, offset < sizes[:, None], expert * height + jnp.minimum(row - jnp.take(starts, expert), height - 1))


def _over_the_rest(dispatch: Dispatch, height: int, extra: int, body, carry):
    """body(expert, pairs [extra], filled [extra], carry) for each block of the rows that no batched block holds, in their order."""
    order, _, sizes = dispatch
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes + height
    rest = jnp.maximum(sizes - height, 0)
    block_ends = jnp.cumsum((rest + extra - 1) // extra, dtype=jnp.int32)
    block_starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), block_ends[:-1]])

    def one(i, carry):
        expert = jnp.sum(i >= block_ends, dtype=jnp.int32)
        done = (i - block_starts[expert]) * extra
        at = jnp.arange(extra, dtype=jnp.int32)
        pairs = jnp.take(order, starts[expert] + done + at, mode="clip")
        return body(expert, pairs, at < rest[expert] - done, carry)

    return jax.lax.fori_loop(jnp.int32(0), block_ends[-1], one, carry)


def _dispatched(dispatch: Dispatch) -> Bool[Array, "m"]:
    """Which pairs belong to an expert."""
    return dispatch.row < jnp.sum(dispatch.sizes, dtype=jnp.int32)


def _rows(x: Float[Array, "n d"], index: Int[Array, "*m"], filled: Bool[Array, "*m"]) -> Float[Array, "*m d"]:
    """x[index] where filled, else 0: an empty place must not bring in what a masked token holds, which may be NaN."""
    return jnp.where(filled[..., None], jnp.take(x, index, axis=0, mode="clip"), jnp.zeros((), x.dtype))


def _put(target: Float[Array, "m d"], pairs: Int[Array, "r"], filled: Bool[Array, "r"], values: Float[Array, "r d"]) -> Float[Array, "m d"]:
    """Writes the filled rows; the others point past the end, where nothing is written."""
    return target.at[jnp.where(filled, pairs, target.shape[0])].set(values, mode="drop")


def _flat(blocks: Float[Array, "e h d"]) -> Float[Array, "m d"]:
    return blocks.reshape(-1, blocks.shape[-1])
