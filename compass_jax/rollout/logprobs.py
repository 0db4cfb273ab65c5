"""What servers show beside a token: its log-prob, and those of the likeliest tokens in its place.

They are of softmax(logits), whatever the temperature is at which the token was drawn: the
log-probs of a prompt and of its answer are of one distribution, the model's.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.model.logprobs import known_columns
from compass_jax.model.precision import at_least_float32

ROWS = 128  # of a prompt whose logits exist at once


class TopLogprobs(NamedTuple):
    """`k` ids in the place of a token, and their log-probs in nats: first the token's own, then the
    likeliest ones, the likeliest first (the token may be among them).
    """

    ids: Int[Array, "*n k"]
    logp: Float[Array, "*n k"]


def empty_logprobs(n: tuple[int, ...], most: int, vocab_size: int, dtype) -> TopLogprobs:
    """Room for those of `most` tokens beside each of `n`, or of the whole vocabulary."""
    shape = (*n, 1 + min(most, vocab_size))
    return TopLogprobs(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, at_least_float32(dtype)))


def top_logprobs(
    logits: Float[Array, "n v"], tokens: Int[Array, "n"], most: int, known: int | None
) -> TopLogprobs:
    """[n 1 + most]: of `tokens` and of the `most` likeliest, by log softmax(logits). Ids from
    `known` on are no tokens and have no probability.
    """
    logp = jax.nn.log_softmax(known_columns(logits, known), axis=-1)
    own = jnp.take_along_axis(logp, tokens[:, None], axis=-1)
    best, ids = jax.lax.top_k(logp, min(most, logits.shape[-1]))
    return TopLogprobs(
        jnp.concatenate([tokens[:, None], ids.astype(jnp.int32)], axis=-1),
        jnp.concatenate([own, best], axis=-1),
    )


def top_logprobs_if(
    wanted: Bool[Array, ""],
    logits: Float[Array, "n v"],
    tokens: Int[Array, "n"],
    most: int,
    known: int | None,
) -> TopLogprobs:
    """`top_logprobs` where somebody wants them, else zeros, which cost nothing."""
    nothing = empty_logprobs(tokens.shape, most, logits.shape[-1], logits.dtype)
    return jax.lax.cond(wanted, lambda: top_logprobs(logits, tokens, most, known), lambda: nothing)


def in_rows(function, hidden: Float[Array, "n d"], tokens: Int[Array, "n"]) -> TopLogprobs:
    """`function(hidden, tokens)`, a few rows at a time."""
    n = tokens.shape[0]
    size = min(ROWS, n)

    def pieces(x):
        x = jnp.pad(x, ((0, -n % size), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(-1, size, *x.shape[1:])

    found = jax.lax.map(lambda xs: function(*xs), (pieces(hidden), pieces(tokens)))
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[:n], found)
