"""Log-prob and entropy of tokens from hidden states, in chunks: `[b t v]` never exists in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from compass_jax.base.aliases import Tree
from compass_jax.devices.sharding import Placement
from compass_jax.model.experts.dispatch import counted_dispatch, permute
from compass_jax.model.precision import at_least_float32


def head_weights(params) -> Float[Array, "d v"]:
    """Returns the LM head: the transposed embedding where the two are tied."""
    return params["head"] if "head" in params else params["embed"].T


def logits_of(hidden: Float[Array, "*n d"], head: Float[Array, "d v"]) -> Float[Array, "*n v"]:
    """Computes LM-head logits, accumulated in at least float32 (float64 stays float64)."""
    wide = at_least_float32(hidden.dtype)
    exact = jax.lax.Precision.HIGHEST if hidden.dtype == wide else None
    return jnp.matmul(
        hidden, head.astype(hidden.dtype), preferred_element_type=wide, precision=exact
    )


def known_columns(
    logits: Float[Array, "*n v"], known: int | None, axis: str | None = None
) -> Float[Array, "*n v"]:
    """Lowers the logits of columns from `known` on, so that they have no probability and no
    gradient.

    These columns pad an LM head: no token has their ids. The value is finite, so that 0 * log 0 is
    0 in an entropy. Without such columns the logits are returned unchanged.

    Args:
        logits: this device's columns.
        known: size of the tokenizer (its largest id + 1), or None for all.
        axis: the mesh axis over which the columns are split, where the caller is inside shard_map.
    """
    v = logits.shape[-1]
    parts = 1 if axis is None else jax.lax.axis_size(axis)
    if known is None or known >= v * parts:
        return logits
    index = jax.lax.broadcasted_iota(jnp.int32, (1,) * (logits.ndim - 1) + (v,), logits.ndim - 1)
    if axis is not None:
        index = index + jax.lax.axis_index(axis) * v
    lowest = jnp.array(jnp.finfo(logits.dtype).min / 2, logits.dtype)
    return jnp.where(index < known, logits, lowest)


def log_softmax_entropy(
    logits: Float[Array, "*n v"],
) -> tuple[Float[Array, "*n v"], Float[Array, "*n"]]:
    """Computes log_softmax and its entropy in nats."""
    logp = jax.nn.log_softmax(logits, axis=-1)
    return logp, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def token_logprobs(
    hidden: Float[Array, "b t d"],
    head: Float[Array, "d v"],
    tokens: Int[Array, "b t"],
    temperature: float | Float[Array, ""],
    chunk: int,
    placement: Placement | None = None,
    known: int | None = None,
    predicted: Bool[Array, "b t"] | None = None,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Computes (logp, entropy) of token t under log_softmax(logits / T) of the hidden state at t-1;
    index 0 is 0 in both.

    The entropy is of the same distribution and carries no gradient. A device holds the logits of
    `chunk` tokens at a time, in the backward pass too (which recomputes each chunk). The head's
    columns from `known` on are ignored (`known_columns`).

    Args:
        predicted: the tokens whose numbers are needed; those of others are 0, and chunks without
            any of them are not computed. None: all.
    """
    head_of, wide = _Head(chunk, known, None), at_least_float32(hidden.dtype)
    scale = jnp.asarray(temperature, wide)
    # Position t predicts token t + 1. The last position's target wraps around and is cut off below.
    targets = jnp.roll(tokens, -1, axis=1)
    if predicted is not None:
        predicted = jnp.roll(predicted, -1, axis=1).at[:, -1].set(False)
    if placement is None:
        logp, entropy = _chunked(hidden, head, targets, predicted, scale, head_of)
    else:
        logp, entropy = _over_tokens(placement, hidden, head, targets, predicted, scale, head_of)
    front = ((0, 0), (1, 0))
    return jnp.pad(logp[:, :-1], front), jnp.pad(entropy[:, :-1], front)


class _Head(NamedTuple):
    """The static settings of log-probs."""

    chunk: int
    known: int | None
    axis: str | None  # the mesh axis over which the vocabulary is split

    def __call__(self, logits, targets, temperature):
        """Computes (logp, entropy) of `targets` `[n]`."""
        logits = known_columns(logits / temperature, self.known, self.axis)
        if self.axis is not None:
            return _split_logprobs(logits, targets, self.axis)
        logp, entropy = log_softmax_entropy(logits)
        return jnp.take_along_axis(logp, targets[:, None], axis=-1)[:, 0], entropy


def _over_tokens(
    placement: Placement,
    hidden: Float[Array, "b t d"],
    head: Float[Array, "d v"],
    targets: Int[Array, "b t"],
    predicted: Bool[Array, "b t"] | None,
    temperature: Float[Array, ""],
    head_of: _Head,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Computes (logp, entropy) of `targets` on each device's tokens and part of the vocabulary."""
    by_token = P(
        placement.batch_axes(hidden.shape[0]) or None, placement.token_axis(hidden.shape[1])
    )
    axis = "tensor" if placement.size("tensor") > 1 else None
    return jax.shard_map(
        partial(_chunked, head_of=head_of._replace(axis=axis)),
        mesh=placement.mesh,
        in_specs=(by_token, P(None, axis), by_token, None if predicted is None else by_token, P()),
        out_specs=(by_token, by_token),
        check_vma=False,
    )(hidden, head, targets, predicted, temperature)


def _chunked(hidden, head, targets, predicted, temperature, head_of: _Head):
    """Computes (logp, entropy) of `targets` `[b t]` from the hidden states at the same index, a
    chunk of the predicted ones at a time.
    """
    b, t, d = hidden.shape
    n = b * t
    size = min(head_of.chunk, n)
    rows, targets, count, first = hidden.reshape(n, d), targets.reshape(n), n, None
    if predicted is not None and size < n:
        # Predicted tokens come first, so that chunks after them are skipped.
        first = counted_dispatch(jnp.where(predicted.reshape(n), 0, 1), 1)
        # The transpose of `permute`, for the gradient of `rows`, is a gather and no scatter-add.
        rows, targets = permute(rows, first.order, first.row), jnp.take(targets, first.order)
        count = first.sizes[0]
    pad = -n % size
    rows, targets = jnp.pad(rows, ((0, pad), (0, 0))), jnp.pad(targets, (0, pad))
    out = jnp.stack(_logprobs(rows, head, targets, count, temperature, size, head_of), axis=1)[:n]
    out = (out if first is None else permute(out, first.row, first.order)).reshape(b, t, 2)
    if predicted is not None:
        out = jnp.where(predicted[:, :, None], out, jnp.zeros_like(out))
    return out[:, :, 0], out[:, :, 1]


# JAX has no reverse-mode derivative of a loop whose number of iterations is traced.
@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _logprobs(
    rows: Float[Array, "m d"],
    head: Float[Array, "d v"],
    targets: Int[Array, "m"],
    count: Int[Array, ""] | int,
    temperature: Float[Array, ""],
    size: int,
    head_of: _Head,
) -> tuple[Float[Array, "m"], Float[Array, "m"]]:
    """Computes (logp, entropy) of the first `count` rows, `size` at a time. Others are 0, or what
    the last chunk has for them.
    """
    wide = at_least_float32(rows.dtype)

    def one(i, out):
        logits = logits_of(_part(rows, i, size), head)
        numbers = head_of(logits, _part(targets, i, size), temperature)
        return tuple(_put(x, y, i, size) for x, y in zip(out, numbers, strict=True))

    zeros = jnp.zeros(rows.shape[:1], wide)
    return _over_chunks(one, (zeros, zeros), count, size, rows.shape[0])


def _logprobs_fwd(rows, head, targets, count, temperature, size: int, head_of: _Head):
    out = _logprobs(rows, head, targets, count, temperature, size, head_of)
    return out, (rows, head, targets, count, temperature)


def _logprobs_bwd(size: int, head_of: _Head, saved, cotangents):
    """Accumulates the head's gradient in at least float32. The logits' gradient is rounded to the
    type of the hidden states, so that both products have operands of that type.
    """
    rows, head, targets, count, temperature = saved
    wide = at_least_float32(rows.dtype)
    exact = jax.lax.Precision.HIGHEST if rows.dtype == wide else None
    product = partial(jnp.matmul, preferred_element_type=wide, precision=exact)
    matrix = head.astype(rows.dtype)

    def one(i, grads):
        d_rows, d_head = grads
        # The entropy carries no gradient: cotangents[1] is not read.
        h, target, g = (_part(x, i, size) for x in (rows, targets, cotangents[0]))
        _, pull = jax.vjp(lambda x: head_of(x, target, temperature)[0], logits_of(h, head))
        d_logits = pull(g)[0].astype(rows.dtype)
        d_rows = _put(d_rows, product(d_logits, matrix.T).astype(rows.dtype), i, size)
        return d_rows, d_head + product(h.T, d_logits)

    start = jnp.zeros_like(rows), jnp.zeros(head.shape, wide)
    d_rows, d_head = _over_chunks(one, start, count, size, rows.shape[0])
    return d_rows, d_head.astype(head.dtype), None, None, jnp.zeros_like(temperature)


_logprobs.defvjp(_logprobs_fwd, _logprobs_bwd)


def _over_chunks(
    one: Callable, start: Tree, count: Int[Array, ""] | int, size: int, rows: int
) -> Tree:
    """Runs `one(i, carry) -> carry` for each chunk of `size` of the first `count` of `rows`. A
    single chunk has no loop around it.
    """
    if rows == size:
        return one(0, start)
    return jax.lax.fori_loop(0, -(-count // size), one, start)


def _part(x: Array, i, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * size, size)


def _put(x: Array, part: Array, i, size: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, i * size, 0)


def _split_logprobs(
    logits: Float[Array, "n v"], target: Int[Array, "n"], axis: str
) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """Computes (logp of the target, entropy) from each device's part of the vocabulary."""
    size = logits.shape[1]
    # pmax has no derivative in JAX, and the shift cancels in the log-prob.
    largest = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits, axis=1)), axis)
    shifted = logits - largest[:, None]
    weights = jnp.exp(shifted)
    total = jax.lax.psum(jnp.sum(weights, axis=1), axis)
    local = target - jax.lax.axis_index(axis) * size
    is_local = (local >= 0) & (local < size)
    local_logit = jnp.take_along_axis(shifted, jnp.clip(local, 0, size - 1)[:, None], axis=1)[:, 0]
    chosen = jax.lax.psum(jnp.where(is_local, local_logit, jnp.zeros((), local_logit.dtype)), axis)
    logz = jnp.log(total)
    mean = jax.lax.psum(jnp.sum(weights * shifted, axis=1), axis) / total
    # The entropy is log Z minus the mean of the shifted logits.
    return chosen - logz, jax.lax.stop_gradient(logz - mean)
