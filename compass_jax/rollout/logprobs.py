"""The log-probs that servers return with a token: its own, and those of the likeliest tokens.

They are those of softmax(logits) at temperature 1, whatever temperature drew the token, so that the
log-probs of a prompt and of its answer belong to one distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.base.aliases import Tree
from compass_jax.model.logprobs import known_columns
from compass_jax.model.precision import at_least_float32

ROWS = 128  # rows of a prompt whose logits exist at once


class TopLogprobs(NamedTuple):
    """`k` ids for the position of a token, and their log-probs in nats: first the token itself,
    then the likeliest tokens in falling order, which may include it.
    """

    ids: Int[Array, "*n k"]
    logp: Float[Array, "*n k"]


def empty_logprobs(n: tuple[int, ...], most: int, vocab_size: int, dtype) -> TopLogprobs:
    """Returns zeros for `n` tokens and their `most` likeliest (at most the vocabulary)."""
    shape = (*n, 1 + min(most, vocab_size))
    return TopLogprobs(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, at_least_float32(dtype)))


def top_logprobs(
    logits: Float[Array, "n v"], tokens: Int[Array, "n"], most: int, known: int | None
) -> TopLogprobs:
    """Returns `[n 1 + most]`: `tokens` and the `most` likeliest by log softmax(logits). Ids from
    `known` on are not tokens and have no probability.
    """
    logp = jax.nn.log_softmax(known_columns(logits, known), axis=-1)
    drawn = jnp.take_along_axis(logp, tokens[:, None], axis=-1)
    best, ids = jax.lax.top_k(logp, min(most, logits.shape[-1]))
    return TopLogprobs(
        jnp.concatenate([tokens[:, None], ids.astype(jnp.int32)], axis=-1),
        jnp.concatenate([drawn, best], axis=-1),
    )


def top_logprobs_if(
    requested: Bool[Array, ""],
    logits: Float[Array, "n v"],
    tokens: Int[Array, "n"],
    most: int,
    known: int | None,
) -> TopLogprobs:
    """Returns `top_logprobs` if `requested`, else zeros, at no cost."""
    zeros = empty_logprobs(tokens.shape, most, logits.shape[-1], logits.dtype)
    return jax.lax.cond(requested, lambda: top_logprobs(logits, tokens, most, known), lambda: zeros)


def in_rows(function: Callable[..., Tree], *arrays: Array) -> Tree:
    """Returns `function(*arrays)`, arrays of `n` rows, computed a few rows at a time."""
    n = arrays[0].shape[0]
    size = min(ROWS, n)

    def pieces(x):
        x = jnp.pad(x, ((0, -n % size), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(-1, size, *x.shape[1:])

    results = jax.lax.map(lambda xs: function(*xs), tuple(map(pieces, arrays)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n], results)
