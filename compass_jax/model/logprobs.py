"""Log-prob and entropy of tokens from hidden states, in chunks: `[b t v]` never exists in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from compass_jax.model.precision import at_least_float32
from compass_jax.sharding import Placement


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
    temperature: float,
    chunk: int,
    placement: Placement | None = None,
    known: int | None = None,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Computes (logp, entropy) of token t under log_softmax(logits / T) of the hidden state at t-1;
    index 0 is 0 in both.

    The entropy is of the same distribution and carries no gradient. A device holds the logits of
    `chunk` tokens at a time, in the backward pass too (which recomputes each chunk). The head's
    columns from `known` on are ignored (`known_columns`).
    """
    targets, run = (
        jnp.roll(tokens, -1, axis=1),
        partial(_chunked, temperature=temperature, chunk=chunk, known=known),
    )
    if placement is None:
        logp, entropy = run(hidden, head, targets)
    else:
        logp, entropy = _over_tokens(placement, run, hidden, head, targets)
    front = ((0, 0), (1, 0))
    return jnp.pad(logp[:, :-1], front), jnp.pad(entropy[:, :-1], front)


def _over_tokens(
    placement: Placement,
    chunked: Callable,
    hidden: Float[Array, "b t d"],
    head: Float[Array, "d v"],
    targets: Int[Array, "b t"],
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Computes (logp, entropy) of `targets` by `chunked(hidden, head, targets, axis)` on each
    device's tokens and part of the vocabulary.
    """
    by_token = P(
        placement.batch_axes(hidden.shape[0]) or None, placement.token_axis(hidden.shape[1])
    )
    axis = "tensor" if placement.size("tensor") > 1 else None
    local = partial(chunked, axis=axis)
    return jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(by_token, P(None, axis), by_token),
        out_specs=(by_token, by_token),
        check_vma=False,
    )(hidden, head, targets)


def _chunked(
    hidden,
    head,
    targets,
    temperature: float,
    chunk: int,
    axis: str | None = None,
    known: int | None = None,
):
    """Computes (logp, entropy) of `targets` `[b t]` from the hidden states at the same index.
    `axis` is the mesh axis over which the vocabulary is split.
    """
    b, t, d = hidden.shape
    n = b * t
    size = min(chunk, n)
    pad = -n % size
    flat = jnp.pad(hidden.reshape(n, d), ((0, pad), (0, 0))).reshape(-1, size, d)
    targets = jnp.pad(targets.reshape(n), (0, pad)).reshape(-1, size)

    @jax.checkpoint
    def one(h, target):
        logits = known_columns(logits_of(h, head) / temperature, known, axis)
        if axis is not None:
            return _split_logprobs(logits, target, axis)
        logp, entropy = log_softmax_entropy(logits)
        return jnp.take_along_axis(logp, target[:, None], axis=-1)[:, 0], jax.lax.stop_gradient(
            entropy
        )

    if flat.shape[0] == 1:
        out = one(flat[0], targets[0])
    else:
        out = jax.lax.map(lambda xs: one(*xs), (flat, targets))
    return tuple(x.reshape(-1)[:n].reshape(b, t) for x in out)


def _split_logprobs(
    logits: Float[Array, "n v"], target: Int[Array, "n"], axis: str
) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """Computes (logp of the target, entropy) from each device's part of the vocabulary."""
    size = logits.shape[1]
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
    return chosen - logz, jax.lax.stop_gradient(logz - mean)
