"""Grouped SwiGLU for CPU, where XLA's `ragged_dot` is a dense product over all experts: padded
blocks, nothing dropped.

Few rows (decoding) take one batched matmul, in which every expert has a block of `height` rows; a
loop over smaller blocks computes the overflow. Many rows (training, prefill) are gathered once into
the order of the experts. An expert's rows are blocks of the full size (about the mean load) and one
smaller block for the remainder, with one loop for each block size. So every product has a shape
known to XLA, and a skewed load costs as much as an even one: at most a unit of padding rows per
expert.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.base.aliases import Tree
from compass_jax.model.experts.activation import swiglu, swiglu_pullback
from compass_jax.model.experts.dispatch import Dispatch
from compass_jax.model.quantize import Quantized, matmul, of_expert

MANY_ROWS = 128  # rows per expert, on average
SMALL_MATRIX = 4096  # weights


def grouped_swiglu(
    x: Float[Array, "n d"],
    gates: Float[Array, "n k"],
    weights: dict[str, Float[Array, "e ..."] | Quantized],
    dispatch: Dispatch,
    parts: int = 1,
    limit: float = 0.0,
) -> Float[Array, "n d"]:
    """Computes sum_k gates_k * SwiGLU of a token's k-th expert; masked tokens give 0.

    Args:
        weights: gate and up `[e d f]`, or their concatenation gate_up `[e d 2f]` (one wider
            product; not differentiable); down `[e f d]`. gate_up and down may be 8-bit. Biases
            `[e f]` and so on, if any, as `gate_bias`.
        parts: number of devices that share the experts: about 1 / parts of the pairs are
            dispatched.
        limit: as in `activation.swiglu`.
    """
    # At least one: few rows are replicated over the devices, and a share of them may be below 1.
    down, pairs = weights["down"], max(1, dispatch.order.shape[0] // parts)
    blocks = block_shapes(pairs, down.shape[0], down.shape[1] * down.shape[2])
    names = ("gate_up", "down") if "gate_up" in weights else ("gate", "up", "down")
    biases: Tree = (
        tuple(weights[f"{name}_bias"] for name in names) if "down_bias" in weights else None
    )
    if "gate_up" not in weights:
        gate, up = weights["gate"], weights["up"]
        return sized_swiglu(x, gates, gate, up, down, dispatch, blocks, biases, limit)
    gate_up = weights["gate_up"]
    if pairs >= MANY_ROWS * down.shape[0]:
        return sized_forward(x, gates, (gate_up,), down, dispatch, blocks, biases, limit)[0]
    height, extra = block_heights(pairs, down.shape[0])
    height = min(height, x.shape[0])
    return batched_swiglu(x, gates, gate_up, down, dispatch, height, extra, biases, limit)


def block_heights(pairs: int, experts: int) -> tuple[int, int]:
    """Returns the rows of an expert's block, and of a block of the overflow loop.

    The height is two standard deviations of an even load above the mean, since an iteration of the
    loop reads an expert's weights again for a row or two.
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
    biases: tuple[Float[Array, "e f2"], Float[Array, "e d"]] | None = None,
    limit: float = 0.0,
) -> Float[Array, "n d"]:
    """Computes `grouped_swiglu` with blocks of `height` rows in one batched matmul, and blocks of
    `extra` rows in a loop for the overflow.
    """
    k = gates.shape[1]
    offset, starts, expert_of_pair = (
        jnp.arange(height, dtype=jnp.int32)[None, :],
        dispatch.starts(),
        dispatch.expert(),
    )
    # [experts, height]; places past an expert's rows hold another expert's pair and are masked.
    pair = jnp.take(dispatch.order, starts[:, None] + offset, mode="clip")
    rows = rows_of(x, pair // k, offset < dispatch.sizes[:, None])
    wide_biases = None if biases is None else tuple(bias[:, None, :] for bias in biases)
    out = _swiglu(rows, gate_up, down, wide_biases, limit)
    # A pair that does not fit into its block reads the block's last row here; the loop over the
    # overflow writes its result afterwards.
    place = expert_of_pair * height + jnp.minimum(
        dispatch.row - jnp.take(starts, expert_of_pair), height - 1
    )
    out = rows_of(out.reshape(-1, out.shape[-1]), place, dispatch.dispatched())
    rest = jnp.maximum(dispatch.sizes - height, 0)
    blocks = (rest + extra - 1) // extra
    ends = jnp.cumsum(blocks, dtype=jnp.int32)

    def one(i, out):
        # The first expert whose cumulative number of blocks exceeds i.
        expert = jnp.sum(i >= ends, dtype=jnp.int32)
        done = (i - (ends[expert] - blocks[expert])) * extra
        at = jnp.arange(extra, dtype=jnp.int32)
        pairs, filled = (
            jnp.take(dispatch.order, starts[expert] + height + done + at, mode="clip"),
            at < rest[expert] - done,
        )
        rows = rows_of(x, pairs // k, filled)
        own_biases = None if biases is None else tuple(bias[expert][None] for bias in biases)
        matrices = of_expert(gate_up, expert), of_expert(down, expert)
        return _put(out, pairs, filled, _swiglu(rows, *matrices, own_biases, limit))

    out = jax.lax.fori_loop(jnp.int32(0), ends[-1], one, out)
    return jnp.einsum("nkd,nk->nd", out.reshape(*gates.shape, -1), gates)


def _swiglu(rows, gate_up, down, biases, limit: float):
    hidden = matmul(rows, gate_up)
    a, u = jnp.split(hidden if biases is None else hidden + biases[0], 2, axis=-1)
    out = matmul(swiglu(a, u, limit), down)
    return out if biases is None else out + biases[1]


def _put(
    target: Float[Array, "m d"],
    pairs: Int[Array, "r"],
    filled: Bool[Array, "r"],
    values: Float[Array, "r d"],
) -> Float[Array, "m d"]:
    """Writes the filled rows; other indices point past the end, where writes are dropped."""
    return target.at[jnp.where(filled, pairs, target.shape[0])].set(values, mode="drop")


class _Layout(NamedTuple):
    """The place of the experts' rows; each expert starts at a whole unit."""

    pair: Int[Array, "c"]
    filled: Bool[Array, "c"]
    place: Int[Array, "m"]  # of each pair; arbitrary for a pair without an expert
    starts: Int[Array, "e"]
    units: Int[Array, "e"]


class Blocks(NamedTuple):
    """Shapes of blocks: 1 to `sizes` units of `unit` rows."""

    unit: int
    sizes: int

    @property
    def full(self) -> int:
        """Rows of the largest block."""
        return self.unit * self.sizes


def block_shapes(pairs: int, experts: int, weights: int) -> Blocks:
    """Returns units of an eighth of the mean load, in multiples of 8 rows, and the number of sizes
    that makes the largest block about the mean load.

    Experts with few `weights` in a matrix have half and full blocks only: their padding costs less
    than the compilation of eight products.
    """
    mean = pairs / experts
    if weights <= SMALL_MATRIX:
        return Blocks(8 * max(1, math.ceil(mean / 16)), 2)
    unit = max(8, 8 * round(mean / 64))
    return Blocks(unit, min(8, max(2, round(mean / unit))))


def rows_of(
    x: Float[Array, "n d"], index: Int[Array, "*m"], filled: Bool[Array, "*m"]
) -> Float[Array, "*m d"]:
    """Returns x[index] where filled, else 0. A masked token may hold NaN, which must not reach an
    empty row.
    """
    return jnp.where(
        filled[..., None], jnp.take(x, index, axis=0, mode="clip"), jnp.zeros((), x.dtype)
    )


def combine(
    values: Float[Array, "c d"],
    place: Int[Array, "n k"],
    filled: Bool[Array, "n k"],
    gates: Float[Array, "n k"] | None,
) -> Float[Array, "n d"]:
    """Computes sum_j gates[n, j] * values[place[n, j]] over the filled places; without gates, the
    plain sum.

    This is one pass on CPU, where a gather of all pairs and a contraction are three.
    """
    parts = [rows_of(values, place[:, j], filled[:, j]) for j in range(place.shape[1])]
    scaled = (part if gates is None else part * gates[:, j, None] for j, part in enumerate(parts))
    total: Tree = sum(scaled)
    return total


def sized_forward(
    x: Float[Array, "n d"],
    gates: Float[Array, "n k"],
    into: tuple[Array | Quantized, ...],
    down: Float[Array, "e f d"] | Quantized,
    dispatch: Dispatch,
    blocks: Blocks,
    biases: tuple[Array, ...] | None = None,
    limit: float = 0.0,
):
    """Returns (output `[n d]`, residuals of the backward pass). `into` is (gate, up) `[e d f]`, or
    their concatenation `[e d 2f]`; `biases` has one for each of `into` and one for down.
    """
    layout = _arrange(dispatch, blocks)
    rows = rows_of(x, layout.pair // gates.shape[1], layout.filled)

    def body(count, expert, first, carry):
        part = jax.lax.dynamic_slice_in_dim(rows, first, count)
        hidden = [matmul(part, of_expert(w, expert)) for w in into]
        if biases is not None:
            hidden = [h + b[expert][None] for h, b in zip(hidden, biases[:-1], strict=True)]
        a, u = hidden if len(into) == 2 else jnp.split(hidden[0], 2, axis=-1)
        out = matmul(swiglu(a, u, limit), of_expert(down, expert))
        out = out if biases is None else out + biases[-1][expert][None]
        return tuple(
            _write(rows_of_block, new, first)
            for rows_of_block, new in zip(carry, (*hidden, out), strict=True)
        )

    start = tuple(jnp.zeros((rows.shape[0], w.shape[-1]), x.dtype) for w in (*into, down))
    *hidden, out = _over_blocks(layout, blocks, body, start)
    return combine(out, *_by_token(layout, dispatch, gates), gates), (layout, rows, *hidden)


@partial(jax.custom_vjp, nondiff_argnums=(6, 8))
def sized_swiglu(
    x, gates, gate, up, down, dispatch: Dispatch, blocks: Blocks, biases=None, limit: float = 0.0
) -> Float[Array, "n d"]:
    """Computes sum_k gates_k * SwiGLU of a token's k-th expert; 0 for masked tokens. Differentiable
    in all arrays but those of `dispatch`.

    x `[n d]`, gates `[n k]`, gate and up `[e d f]`, down `[e f d]`, their biases `[e f]`, `[e f]`
    and `[e d]` if any; `dispatch` holds the n * k pairs. Gates of masked tokens must be finite.
    """
    return sized_forward(x, gates, (gate, up), down, dispatch, blocks, biases, limit)[0]


def _sized_fwd(x, gates, gate, up, down, dispatch, blocks: Blocks, biases, limit: float):
    out, saved = sized_forward(x, gates, (gate, up), down, dispatch, blocks, biases, limit)
    return out, (saved, dispatch, gates, gate, up, down, biases)


def _sized_bwd(blocks: Blocks, limit: float, residuals, g):
    """Computes the gates' gradient from the hidden layer, <g, h W> = <g W^T, h>, so that the output
    is not needed again.
    """
    (layout, x, a, u), dispatch, gates, gate, up, down, biases = residuals
    # Empty rows have gate and g zero, so they add nothing to the weights' and biases' gradients.
    row_gates = rows_of(gates.reshape(-1, 1), layout.pair, layout.filled)
    rows = x, a, u, row_gates, rows_of(g, layout.pair // gates.shape[1], layout.filled)

    def body(count, expert, first, carry):
        d_rows, d_gate_rows, *totals = carry
        x, a, u, row_gates, g = (
            jax.lax.dynamic_slice_in_dim(matrix, first, count) for matrix in rows
        )
        d_out = g @ down[expert].T
        h, d_a, d_u = swiglu_pullback(a, u, row_gates * d_out, limit)
        d_x = d_a @ gate[expert].T + d_u @ up[expert].T
        parts: tuple[Array, ...] = (x.T @ d_a, x.T @ d_u, (row_gates * h).T @ g)
        d_gate = jnp.sum(h * d_out, axis=1, keepdims=True)
        if biases is not None:
            parts += tuple(jnp.sum(d, axis=0, keepdims=True) for d in (d_a, d_u, row_gates * g))
            d_gate = d_gate + jnp.sum(g * biases[2][expert][None], axis=1, keepdims=True)
        new = _write(d_rows, d_x, first), _write(d_gate_rows, d_gate, first)
        return *new, *(_add(total, part, expert) for total, part in zip(totals, parts, strict=True))

    rows_of_biases = () if biases is None else tuple(bias[:, None, :] for bias in biases)
    totals = (x, row_gates, gate, up, down, *rows_of_biases)
    d_rows, d_gate_rows, *d_weights = _over_blocks(
        layout, blocks, body, tuple(jnp.zeros_like(v) for v in totals)
    )
    d_biases = None if biases is None else tuple(d[:, 0] for d in d_weights[3:])
    place, filled = _by_token(layout, dispatch, gates)
    d_gates = rows_of(d_gate_rows, layout.place, dispatch.dispatched()).reshape(gates.shape)
    return combine(d_rows, place, filled, None), d_gates, *d_weights[:3], None, d_biases


sized_swiglu.defvjp(_sized_fwd, _sized_bwd)


def _by_token(layout: _Layout, dispatch: Dispatch, gates) -> tuple[Array, Array]:
    return layout.place.reshape(gates.shape), dispatch.dispatched().reshape(gates.shape)


def _arrange(dispatch: Dispatch, blocks: Blocks) -> _Layout:
    (order, row, sizes), unit = dispatch, blocks.unit
    units, experts = (sizes + unit - 1) // unit, len(sizes)
    ends = jnp.cumsum(units, dtype=jnp.int32) * unit
    starts, sorted_starts, expert_of_pair = (
        ends - units * unit,
        dispatch.starts(),
        dispatch.expert(),
    )
    # Every product is compiled, so a full block must fit.
    room = max(-(-order.shape[0] // unit) + experts, blocks.sizes) * unit
    place = jnp.arange(room, dtype=jnp.int32)
    expert = jnp.minimum(
        jnp.sum(place[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), experts - 1
    )
    offset = place - jnp.take(starts, expert)
    pair = jnp.take(order, jnp.take(sorted_starts, expert) + offset, mode="clip")
    return _Layout(
        pair,
        offset < jnp.take(sizes, expert),
        jnp.take(starts, expert_of_pair) + row - jnp.take(sorted_starts, expert_of_pair),
        starts,
        units,
    )


def _over_blocks(layout: _Layout, blocks: Blocks, body, carry):
    """body(rows, expert, first place, carry) for each block: those of full size, then the smaller
    ones, size by size.
    """
    full, rest = layout.units // blocks.sizes, layout.units % blocks.sizes
    ends = jnp.cumsum(full, dtype=jnp.int32)

    def one_full(i, carry):
        expert = jnp.sum(i >= ends, dtype=jnp.int32)
        done = i - (ends[expert] - full[expert])
        return body(blocks.full, expert, layout.starts[expert] + done * blocks.full, carry)

    carry = jax.lax.fori_loop(jnp.int32(0), ends[-1], one_full, carry)
    # Experts sorted by the units of their remainder: each size has a separate loop, whose product
    # has a static shape.
    by_size = jnp.argsort(rest, stable=True).astype(jnp.int32)
    bounds = jnp.cumsum(
        jnp.sum(
            rest[:, None] == jnp.arange(blocks.sizes, dtype=rest.dtype)[None, :],
            axis=0,
            dtype=jnp.int32,
        ),
        dtype=jnp.int32,
    )
    for size in range(1, blocks.sizes):

        def one(i, carry, size=size):
            expert = by_size[i]
            return body(
                size * blocks.unit,
                expert,
                layout.starts[expert] + full[expert] * blocks.full,
                carry,
            )

        carry = jax.lax.fori_loop(bounds[size - 1], bounds[size], one, carry)
    return carry


def _write(rows: Float[Array, "c d"], part: Float[Array, "r d"], first) -> Float[Array, "c d"]:
    return jax.lax.dynamic_update_slice_in_dim(rows, part, first, axis=0)


def _add(total: Float[Array, "e d f"], part: Float[Array, "d f"], expert) -> Float[Array, "e d f"]:
    expert_total = jax.lax.dynamic_index_in_dim(total, expert, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, expert_total + part, expert, axis=0)
