"""SwiGLU of rows sorted by expert, for CPU, where XLA's ragged_dot is a masked dense product (5 to 15 GFLOP/s; a matmul reaches 250).

Few rows (decoding): groups are padded to blocks of one height, one block per expert, and multiplied as one batched matmul.
The height is picked at run time (`lax.switch`) as the first that holds the fullest group, so nothing is ever dropped.

Many rows (training, prefill): a loop over blocks of fixed height. Sorted rows of an expert are contiguous, so a block is a
slice: nothing is gathered, and skewed loads cost no more than even ones.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_FEW_ROWS = 4096  # up to this many padded rows in the worst case, one batched matmul is the fastest


def heights(tokens: int, top_k: int, experts: int) -> tuple[int, ...]:
    """Block heights for few rows, lowest first; the last one holds any load (an expert gets at most every token once)."""
    mean = tokens * top_k / experts
    ladder = sorted({8 * math.ceil(mean * factor / 8) for factor in (1.0, 1.5, 2.0, 3.0)})
    return (*(h for h in ladder if h < tokens), tokens)


def sorted_swiglu(
    rows: Float[Array, "m d"], gate: Float[Array, "e d f"], up: Float[Array, "e d f"], down: Float[Array, "e f d"], sizes: Int[Array, "e"], top_k: int
) -> Float[Array, "m d"]:
    """SwiGLU of each row with its group's expert; `sizes` are the groups' rows, in order. Rows past sum(sizes) are undefined."""
    tokens, experts = rows.shape[0] // top_k, gate.shape[0]
    if tokens * experts <= _FEW_ROWS:
        return padded_swiglu(rows, gate, up, down, sizes, heights(tokens, top_k, experts))
    mean = rows.shape[0] / experts
    return looped_swiglu(rows, gate, up, down, sizes, max(32, min(256, 2 ** round(math.log2(mean / 2)))))


# ---- few rows: one padded block per expert ---------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def padded_swiglu(rows, gate, up, down, sizes, choices: tuple[int, ...]) -> Float[Array, "m d"]:
    """`sorted_swiglu` with blocks of the first height of `choices` that holds the fullest group.

    The backward pass picks the height again and recomputes, because residuals of a shape known only at run time cannot be kept.
    """

    def branch(height: int, rows, gate, up, down, sizes):
        row, filled, place = _arrange(sizes, height, rows.shape[0])
        return _collect(_swiglu(_fill(rows, row, filled), gate, up, down), place)

    return _first_that_holds(branch, choices, sizes, rows, gate, up, down, sizes)


def _padded_fwd(rows, gate, up, down, sizes, choices):
    return padded_swiglu(rows, gate, up, down, sizes, choices), (rows, gate, up, down, sizes)


def _padded_bwd(choices, saved, g):
    def branch(height: int, g, rows, gate, up, down, sizes):
        row, filled, place = _arrange(sizes, height, rows.shape[0])
        _, pullback = jax.vjp(_swiglu, _fill(rows, row, filled), gate, up, down)
        d_rows, *d_weights = pullback(_fill(g, row, filled))
        return _collect(d_rows, place), *d_weights

    return *_first_that_holds(branch, choices, saved[-1], g, *saved), None


padded_swiglu.defvjp(_padded_fwd, _padded_bwd)


def _swiglu(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def _first_that_holds(branch, choices: tuple[int, ...], sizes, *args):
    """Runs `branch` with the first height that the fullest group fits in; the last fits any."""
    choice = jnp.sum(jnp.max(sizes) > jnp.array(choices[:-1], sizes.dtype), dtype=jnp.int32)
    return jax.lax.switch(choice, [partial(branch, height) for height in choices], *args)


def _bounds(sizes: Int[Array, "e"]) -> tuple[Int[Array, "e"], Int[Array, "e"]]:
    """First row of each group, and the row behind its last."""
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    return ends - sizes, ends


def _arrange(sizes: Int[Array, "e"], height: int, m: int) -> tuple[Int[Array, "e h"], Bool[Array, "e h 1"], Int[Array, "m"]]:
    """The sorted row in each place of each block, whether the place is filled, and the flat place of each sorted row."""
    starts, ends = _bounds(sizes)
    offset, index = jnp.arange(height, dtype=jnp.int32)[None, :], jnp.arange(m, dtype=jnp.int32)
    expert = jnp.sum(index[:, None] >= ends[None, :-1], axis=1, dtype=jnp.int32)
    return starts[:, None] + offset, (offset < sizes[:, None])[..., None], expert * height + index - jnp.take(starts, expert)


def _fill(rows: Float[Array, "m d"], row: Int[Array, "e h"], filled: Bool[Array, "e h 1"]) -> Float[Array, "e h d"]:
    return jnp.where(filled, jnp.take(rows, row, axis=0, mode="clip"), jnp.zeros((), rows.dtype))


def _collect(out: Float[Array, "e h d"], place: Int[Array, "m"]) -> Float[Array, "m d"]:
    return jnp.take(out.reshape(-1, out.shape[-1]), place, axis=0, mode="clip")


# ---- many rows: a loop over blocks -----------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def looped_swiglu(rows, gate, up, down, sizes, height: int) -> Float[Array, "m d"]:
    """`sorted_swiglu` as a loop over blocks of `height` rows of one expert.

    Experts come in order, so the rows of the next expert that a group's last block also covers are written again, rightly,
    by the blocks after it.
    """
    return _looped_fwd(rows, gate, up, down, sizes, height)[0]


def _over_blocks(sizes: Int[Array, "e"], height: int, body, carry):
    """body(expert, first row of the block, row behind the expert's last, carry) for every block, in the order of the rows."""
    starts, ends = _bounds(sizes)
    block_ends = jnp.cumsum((sizes + height - 1) // height, dtype=jnp.int32)
    block_starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), block_ends[:-1]])

    def one(i, carry):
        expert = jnp.sum(i >= block_ends, dtype=jnp.int32)
        return body(expert, starts[expert] + (i - block_starts[expert]) * height, ends[expert], carry)

    return jax.lax.fori_loop(jnp.int32(0), block_ends[-1], one, carry)


def _looped_fwd(rows, gate, up, down, sizes, height: int):
    m, f = rows.shape[0], gate.shape[2]
    tail = jnp.pad(rows, ((0, height), (0, 0)))  # a last block may reach past the end, where a slice would be moved back

    def body(expert, row, _, carry):
        out, a, u = carry
        x = jax.lax.dynamic_slice_in_dim(tail, row, height)
        a_new, u_new = x @ gate[expert], x @ up[expert]
        y = (jax.nn.silu(a_new) * u_new) @ down[expert]
        return tuple(jax.lax.dynamic_update_slice_in_dim(to, new, row, 0) for to, new in ((out, y), (a, a_new), (u, u_new)))

    empty = jnp.zeros((m + height, f), rows.dtype)
    out, a, u = _over_blocks(sizes, height, body, (jnp.zeros_like(tail), empty, empty))
    return out[:m], (tail, gate, up, down, sizes, a, u)


def _looped_bwd(height: int, saved, g):
    tail, gate, up, down, sizes, a_all, u_all = saved
    g_tail = jnp.pad(g, ((0, height), (0, 0)))

    def body(expert, row, end, carry):
        d_rows, d_gate, d_up, d_down = carry
        x, a, u, g = (jax.lax.dynamic_slice_in_dim(s, row, height) for s in (tail, a_all, u_all, g_tail))
        own = row + jnp.arange(height, dtype=jnp.int32) < end
        g = jnp.where(own[:, None], g, jnp.zeros((), g.dtype))
        s = jax.nn.sigmoid(a)
        d_h = g @ down[expert].T
        d_a, d_u = d_h * u * s * (1 + a * (1 - s)), d_h * a * s
        d_x = d_a @ gate[expert].T + d_u @ up[expert].T
        return (
            jax.lax.dynamic_update_slice_in_dim(d_rows, d_x, row, 0),
            d_gate.at[expert].add(x.T @ d_a),
            d_up.at[expert].add(x.T @ d_u),
            d_down.at[expert].add((a * s * u).T @ g),
        )

    zeros = (jnp.zeros_like(tail), jnp.zeros_like(gate), jnp.zeros_like(up), jnp.zeros_like(down))
    d_rows, *d_weights = _over_blocks(sizes, height, body, zeros)
    return d_rows[: g.shape[0]], *d_weights, None


looped_swiglu.defvjp(_looped_fwd, _looped_bwd)
