"""Prompts through the model, once for all their samples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt, UInt32

from compass_jax.config import RolloutConfig
from compass_jax.model.transformer import Transformer, apply, init_cache
from compass_jax.rollout.sampling import Sampler, sample
from compass_jax.rollout.state import Prefix, lay_cache, next_logits


def prefilled(
    model: Transformer,
    rollout: RolloutConfig,
    params,
    tokens: Int[Array, "p t"],
    lengths: Int[Array, "p"],
    keys: UInt32[Array, "p s 2"],
    sampler: Sampler,
    temperature: Float[Array, "p"] | None,
    routes: UInt[Array, "p t l k"] | None,
) -> Prefix:
    """Prompts run once for all their samples, the first token of each drawn."""
    p, s = keys.shape[:2]
    last, cache, routes = _encode(model, rollout, params, tokens, lengths, routes)
    logits = next_logits(model, params, last, sampler)
    each = None if temperature is None else for_samples(temperature, s)
    token, logp, entropy = (
        x.reshape(p, s)
        for x in sample(
            for_samples(logits, s),
            keys.reshape(p * s, 2),
            for_samples(lengths, s),
            sampler,
            each,
            model.known,
        )
    )
    return Prefix(cache, tokens, lengths, routes, keys, token, logp, entropy, temperature)


def _encode(model: Transformer, rollout: RolloutConfig, params, tokens, lengths, routes):
    """(hidden state of each prompt's last token, cache, routes), by pieces of `prefill_chunk`
    tokens: attention scores are of one piece.
    """
    p, t = tokens.shape
    size = min(t, rollout.prefill_chunk)
    n = -(-t // size)

    def pieces(x):
        """[p t ...] -> [n p size ...]"""
        x = jnp.pad(x, ((0, 0), (0, n * size - t), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(p, n, size, *x.shape[2:]), 1, 0)

    def piece(carry, inputs):
        cache, last = carry
        i, tokens, routes = inputs
        positions = jnp.broadcast_to(i * size + jnp.arange(size, dtype=jnp.int32)[None], (p, size))
        out = apply(
            model,
            params,
            tokens,
            positions,
            mask=positions < lengths[:, None],
            cache=cache,
            routes=routes,
        )
        at = jnp.maximum(lengths - 1, 0) - i * size
        here = jnp.take_along_axis(out.hidden, jnp.clip(at, 0, size - 1)[:, None, None], axis=1)[
            :, 0
        ]
        return (out.cache, jnp.where((at // size == 0)[:, None], here, last)), out.routes

    cache = lay_cache(
        model.placement,
        init_cache(model.config, p, n * size, model.compute, rollout.kv_quantize),
        p,
    )
    start = cache, jnp.zeros((p, model.config.hidden), model.compute.dtype_of("stream"))
    inputs = (
        jnp.arange(n, dtype=jnp.int32),
        pieces(tokens),
        None if routes is None else pieces(routes),
    )
    if n == 1:  # no loop: a scan of one is compiled as a loop
        (cache, last), used = piece(start, jax.tree.map(lambda x: x[0], inputs))
        return last, lay_cache(model.placement, cache, p), used
    (cache, last), used = jax.lax.scan(piece, start, inputs)
    used = (
        None
        if used is None
        else jnp.moveaxis(used, 0, 1).reshape(p, n * size, *used.shape[3:])[:, :t]
    )
    return last, lay_cache(model.placement, jax.tree.map(lambda x: x[..., :t, :], cache), p), used


def for_samples(x: Array, s: int) -> Array:
    """`x` `[p ...]` of prompts for each of their `s` samples, `[p*s ...]`."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], s, *x.shape[1:])).reshape(-1, *x.shape[1:])
