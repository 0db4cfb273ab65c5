"""Grouped SwiGLU for TPUs and GPUs: one `ragged_dot` over the rows of all experts.

A device that has one of p parts of the experts gets every token of p devices, and about 1 / p of
their pairs are of its experts. It computes windows of the sorted rows until none is left, usually
one: the work follows the number of these pairs, and none is dropped even if it gets all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.base.aliases import Tree
from compass_jax.model.experts.activation import swiglu
from compass_jax.model.experts.dispatch import Dispatch, expert_of_row, permute, repeat_tokens
from compass_jax.model.precision import at_least_float32
from compass_jax.model.quantize import Quantized, ragged_matmul
from compass_jax.model.stacks import InStack

OVERFLOW = "overflow"  # scope of the work that a balanced load does not have
MANY_ROWS = 16  # rows per expert, on average, from which windows are used (not measured)


def window_rows(pairs: int, experts: int, parts: int) -> int:
    """Returns the rows of a window on a device with `experts` experts, one of `parts` parts: twice
    the mean load, at most three quarters of the pairs, in multiples of 256. All `pairs` where
    one device has all experts, or where an expert has few rows.
    """
    if parts == 1 or pairs < MANY_ROWS * experts * parts:
        return pairs
    return min(pairs, 256 * math.ceil(pairs * min(2 / parts, 0.75) / 256))


def ragged_swiglu(
    x: Float[Array, "n d"],
    gates: Float[Array, "n k"],
    weights: dict[str, Float[Array, "e ..."] | Quantized | InStack],
    dispatch: Dispatch,
    parts: int = 1,
    limit: float = 0.0,
    dot: Callable[..., Float[Array, "m o"]] = jax.lax.ragged_dot,
) -> Float[Array, "n d"]:
    """Computes sum_k gates_k * SwiGLU of a token's k-th expert with `dot`, which has the signature
    of `jax.lax.ragged_dot`; masked tokens give 0.

    Args:
        weights: gate and up `[e d f]`, or their concatenation gate_up `[e d 2f]`, and down `[e f
            d]`; each may be 8-bit, and have a bias (`gate_bias`).
        parts: number of devices that share the experts, which decides the rows of a window.
        limit: as in `activation.swiglu`.
    """
    order, row, sizes = dispatch
    window = window_rows(order.shape[0], sizes.shape[0], parts)
    if window < order.shape[0]:
        return windowed_swiglu(x, gates, weights, dispatch, window, limit, dot)
    # Pairs of masked tokens come last. Their tokens may be NaN, and the products leave their rows
    # undefined.
    filled = jnp.arange(order.shape[0], dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32)
    rows = jnp.where(filled[:, None], repeat_tokens(x, order, row), jnp.zeros((), x.dtype))
    out = _swiglu_of_rows(rows, None, weights, sizes, limit, dot)
    out = jnp.where(filled[:, None], out, jnp.zeros((), x.dtype))
    return jnp.einsum("nkd,nk->nd", permute(out, row, order).reshape(*gates.shape, -1), gates)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def windowed_swiglu(
    x: Float[Array, "n d"],
    gates: Float[Array, "n k"],
    weights: dict[str, Float[Array, "e ..."] | Quantized | InStack],
    dispatch: Dispatch,
    window: int,
    limit: float,
    dot: Callable[..., Float[Array, "m o"]],
) -> Float[Array, "n d"]:
    """Computes `ragged_swiglu` on `window` of the sorted rows at a time, and its gradient by
    computing each window again. Sums over a token's choices and over windows are in at least
    float32.
    """

    def of_window(start):
        pair, sizes = _window(dispatch, start, window)
        token = pair // gates.shape[1]
        rows = _take(x, token), _take(gates.reshape(-1), pair)
        out = _swiglu_of_rows(*rows, weights, sizes, limit, dot, at_least_float32(x.dtype))
        return _sum_by(token, out, x.shape[0])

    return _over_windows(of_window, dispatch, window).astype(x.dtype)


def _windowed_forward(x, gates, weights, dispatch, window, limit, dot):
    out = windowed_swiglu(x, gates, weights, dispatch, window, limit, dot)
    return out, (x, gates, weights, dispatch)


def _windowed_backward(window, limit, dot, saved, g):
    x, gates, weights, dispatch = saved

    def of_window(start):
        pair, sizes = _window(dispatch, start, window)
        token = pair // gates.shape[1]
        _, pullback = jax.vjp(
            lambda rows, gates, weights: _swiglu_of_rows(rows, gates, weights, sizes, limit, dot),
            _take(x, token),
            _take(gates.reshape(-1), pair),
            weights,
        )
        d_rows, d_gates, d_weights = pullback(_take(g, token))
        d_gates = jnp.zeros(gates.size, gates.dtype).at[pair].set(d_gates, mode="drop")
        return _sum_by(token, d_rows, x.shape[0]), d_gates.reshape(gates.shape), d_weights

    d_x, d_gates, d_weights = _over_windows(of_window, dispatch, window)
    return d_x.astype(x.dtype), d_gates, d_weights, None


windowed_swiglu.defvjp(_windowed_forward, _windowed_backward)


def _over_windows(of_window, dispatch: Dispatch, window: int):
    """Returns the sum of `of_window(start)` over the windows with rows, usually one. The others
    run in a separate loop: around all windows, XLA would copy the weights and repeat their casts.
    """
    rows = jnp.sum(dispatch.sizes, dtype=jnp.int32)

    def add_others(first):
        def add(start, total):
            more = of_window(start)
            return start + window, jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)

        with jax.named_scope(OVERFLOW):
            wide = jax.tree.map(lambda a: a.astype(at_least_float32(a.dtype)), first)
            total = jax.lax.while_loop(lambda x: x[0] < rows, lambda x: add(*x), (window, wide))[1]
            return jax.tree.map(lambda a, b: a.astype(b.dtype), total, first)

    return jax.lax.cond(rows > window, add_others, lambda first: first, of_window(0))


def _window(dispatch: Dispatch, start, window: int):
    """Returns the pair in each row of the window at `start`, and each expert's rows. Rows without a
    pair have the one after the last.
    """
    order, _, sizes = dispatch
    ends, m = jnp.cumsum(sizes, dtype=jnp.int32) - start, order.shape[0]
    # Padded to whole windows, because a slice past the end would be moved back.
    pair = jax.lax.dynamic_slice(jnp.pad(order, (0, -m % window)), (start,), (window,))
    pair = jnp.where(jnp.arange(window, dtype=jnp.int32) < ends[-1], pair, m)
    return pair, jnp.clip(ends, 0, window) - jnp.clip(ends - sizes, 0, window)


def _take(x, index):
    """Returns x[index]; the last for the index after it, in rows whose results are not read."""
    return jnp.take(x, index, axis=0, mode="clip")


def _sum_by(token, rows, tokens: int):
    """Returns each token's sum of its rows, in at least float32; a row with the token after the
    last is in none.

    The TPU sorts the rows by token and adds them in about 22 cycles each. A gather of all choices,
    most of which have no row here, takes three times as long.
    """
    zeros = jnp.zeros((tokens, rows.shape[1]), at_least_float32(rows.dtype))
    return zeros.at[token].add(rows.astype(zeros.dtype), mode="drop")


def _swiglu_of_rows(rows, gates, weights, sizes, limit, dot, dtype=None):
    """Computes SwiGLU of rows sorted by expert, of which the first sizes[0] are the first expert's,
    times each row's gate, if given, in `dtype` or that of the rows. Rows after the last group are
    undefined.

    The gate multiplies the hidden layer, so that its gradient needs no product with `down` again.
    """
    row, zero = jnp.arange(rows.shape[0], dtype=jnp.int32), jnp.zeros((), rows.dtype)
    filled = (row < jnp.sum(sizes, dtype=jnp.int32))[:, None]

    def product(rows, name, dtype=None):
        out = ragged_matmul(rows, weights[name], sizes, dot, dtype)
        bias: Tree = weights.get(f"{name}_bias")
        if bias is None:
            return out
        # a row without a pair has a gradient, too, which is no bias's
        bias = jnp.where(filled, jnp.take(bias, expert_of_row(sizes, row), axis=0), zero)
        return out + (bias if gates is None or name != "down" else gates[:, None] * bias)

    if "gate_up" in weights:
        a, u = jnp.split(product(rows, "gate_up"), 2, axis=-1)
    else:
        a, u = (product(rows, name) for name in ("gate", "up"))
    hidden = swiglu(jnp.where(filled, a, zero), jnp.where(filled, u, zero), limit)
    return product(hidden if gates is None else gates[:, None] * hidden, "down", dtype)
