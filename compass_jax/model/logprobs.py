"""Hidden states -> log-prob and entropy of the taken token, in chunks: `[b t v]` never exists in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compass_jax.model.precision import at_least_float32


def head_weights(params) -> Float[Array, "d v"]:
    """The LM head; the transposed embedding where the two are tied."""
    return params["head"] if "head" in params else params["embed"].T


def logits_of(hidden: Float[Array, "*n d"], head: Float[Array, "d v"]) -> Float[Array, "*n v"]:
    """LM-head logits, accumulated in at least float32 (float64 stays float64)."""
    wide = at_least_float32(hidden.dtype)
    exact = jax.lax.Precision.HIGHEST if hidden.dtype == wide else None
    return jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=wide, precision=exact)


def log_softmax_entropy(logits: Float[Array, "*n v"]) -> tuple[Float[Array, "*n v"], Float[Array, "*n"]]:
    """log_softmax and its entropy in nats."""
    logp = jax.nn.log_softmax(logits, axis=-1)
    return logp, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def token_logprobs(
    hidden: Float[Array, "b t d"], head: Float[Array, "d v"], tokens: Int[Array, "b t"], temperature: float, chunk: int
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """(logp, entropy) of token t under log_softmax(logits / T) of the hidden state at t-1; index 0 is 0 in both.

    Entropy is of the same distribution and carries no gradient. The logits of `chunk` tokens exist at once, in the
    backward pass too (each chunk is recomputed there).
    """
    b, t, d = hidden.shape
    n = b * t
    size = min(chunk, n)
    pad = -n % size
    flat = jnp.pad(hidden.reshape(n, d), ((0, pad), (0, 0))).reshape(-1, size, d)
    targets = jnp.pad(jnp.roll(tokens, -1, axis=1).reshape(n), (0, pad)).reshape(-1, size)

    @jax.checkpoint
    def one(h, target):
        logp, entropy = log_softmax_entropy(logits_of(h, head) / temperature)
        return jnp.take_along_axis(logp, target[:, None], axis=-1)[:, 0], jax.lax.stop_gradient(entropy)

    if flat.shape[0] == 1:
        out = one(flat[0], targets[0])
    else:
        out = jax.lax.map(lambda xs: one(*xs), (flat, targets))

    def align(x):
        x = x.reshape(-1)[:n].reshape(b, t)
        return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))

    return align(out[0]), align(out[1])
