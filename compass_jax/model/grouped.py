"""Grouped SwiGLU for CPU, where XLA's `ragged_dot` is a dense product over all experts: padded
blocks, nothing dropped.

Many rows (training, prefill) take blocks of several sizes, expert after expert (model/sized.py).
Few rows (decoding) are one batched matmul: every expert gets a block of `height` rows, and a loop
over smaller blocks works off what does not fit, if there is any.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.model.quantize import Quantized, matmul, of_expert
from compass_jax.model.sized import Dispatch, block_shapes, rows_of, sized_forward, sized_swiglu

MANY_ROWS = 128  # an expert, on average


def grouped_swiglu(
    x: Float[Array, "n d"],
    gates: Float[Array, "n k"],
    weights: dict[str, Float[Array, "e ..."] | Quantized],
    dispatch: Dispatch,
    parts: int = 1,
) -> Float[Array, "n d"]:
    """sum_k gates_k * SwiGLU of a token's k-th expert; masked tokens give 0.

    `weights`: gate and up `[e d f]`, or both side by side as gate_up `[e d 2f]` (one wider product;
    not differentiable); down `[e f d]`. The latter may be 8-bit. `parts`: about so many of the
    pairs for each that is dispatched.
    """
    down, pairs = weights["down"], dispatch.order.shape[0] // parts
    blocks = block_shapes(pairs, down.shape[0])
    if "gate_up" not in weights:
        return sized_swiglu(x, gates, weights["gate"], weights["up"], down, dispatch, blocks)
    if pairs >= MANY_ROWS * down.shape[0]:
        return sized_forward(x, gates, (weights["gate_up"],), down, dispatch, blocks)[0]
    height, extra = block_heights(pairs, down.shape[0])
    return batched_swiglu(
        x, gates, weights["gate_up"], down, dispatch, min(height, x.shape[0]), extra
    )


def block_heights(pairs: int, experts: int) -> tuple[int, int]:
    """Rows of an expert's block, and of a block of the loop behind it.

    Two standard deviations of an even load above the mean, since a turn of the loop reads an
    expert's weights once more for a row or two.
    """
    mean = pairs / experts
    height = 8 * math.ceil((mean + 2 * math.sqrt(mean)) / 8)
    return height, max(8, height // 4 // 8 * 8)


def batched_swiglu(
    x: Float[Array, "n d"],
    gates: Float[Array, "n k"],
    gate_up: Float[Array, "e d f2"] | Quantized,
    down: Float[Array, "e f d"] | Quantized,
    dispatch: Dispatch,
    height: int,
    extra: int,
) -> Float[Array, "n d"]:
    """`grouped_swiglu` with blocks of `height` rows in one batched matmul, and of `extra` rows in a
    loop for what does not fit in them.
    """
    k = gates.shape[1]
    offset, starts, own = (
        jnp.arange(height, dtype=jnp.int32)[None, :],
        dispatch.starts(),
        dispatch.expert(),
    )
    pair = jnp.take(dispatch.order, starts[:, None] + offset, mode="clip")
    out = _swiglu(rows_of(x, pair // k, offset < dispatch.sizes[:, None]), gate_up, down)
    place = own * height + jnp.minimum(dispatch.row - jnp.take(starts, own), height - 1)
    out = rows_of(out.reshape(-1, out.shape[-1]), place, dispatch.dispatched())
    rest = jnp.maximum(dispatch.sizes - height, 0)
    blocks = (rest + extra - 1) // extra
    ends = jnp.cumsum(blocks, dtype=jnp.int32)

    def one(i, out):
        expert = jnp.sum(i >= ends, dtype=jnp.int32)
        done = (i - (ends[expert] - blocks[expert])) * extra
        at = jnp.arange(extra, dtype=jnp.int32)
        pairs, filled = (
            jnp.take(dispatch.order, starts[expert] + height + done + at, mode="clip"),
            at < rest[expert] - done,
        )
        return _put(
            out,
            pairs,
            filled,
            _swiglu(
                rows_of(x, pairs // k, filled), of_expert(gate_up, expert), of_expert(down, expert)
            ),
        )

    out = jax.lax.fori_loop(jnp.int32(0), ends[-1], one, out)
    return jnp.einsum("nkd,nk->nd", out.reshape(*gates.shape, -1), gates)


def _swiglu(rows, gate_up, down):
    a, u = jnp.split(matmul(rows, gate_up), 2, axis=-1)
    return matmul(jax.nn.silu(a) * u, down)


def _put(
    target: Float[Array, "m d"],
    pairs: Int[Array, "r"],
    filled: Bool[Array, "r"],
    values: Float[Array, "r d"],
) -> Float[Array, "m d"]:
    """Writes the filled rows; the others point past the end, where nothing is written."""
    return target.at[jnp.where(filled, pairs, target.shape[0])].set(values, mode="drop")
