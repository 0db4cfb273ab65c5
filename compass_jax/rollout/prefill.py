"""The prefill: runs prompts through the model, once for all their samples."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt, UInt32

from compass_jax.base.aliases import Tree
from compass_jax.config import RolloutConfig
from compass_jax.model.transformer import Transformer, apply, init_cache
from compass_jax.rollout.logprobs import TopLogprobs, in_rows, top_logprobs
from compass_jax.rollout.sampling import RowSampling, Sampler, sample
from compass_jax.rollout.state import DecodeState, Prefix, lay_cache, next_logits


class Extension(NamedTuple):
    """A sequence whose first `known` tokens have their keys in a slot without pages.

    Args:
        tokens: all `length` tokens of the sequence, padded.
        new: those after the known ones, padded; fewer than `tokens`.
        keys: of its next draw.
        sampling: its parameters, for a `per_request` sampler.
    """

    slot: Int[Array, ""]
    tokens: Int[Array, "t"]
    new: Int[Array, "n"]
    known: Int[Array, ""]
    length: Int[Array, ""]
    keys: UInt32[Array, "1 1 2"]
    sampling: RowSampling | None


def prefilled(
    model: Transformer,
    rollout: RolloutConfig,
    params,
    tokens: Int[Array, "p t"],
    lengths: Int[Array, "p"],
    keys: UInt32[Array, "p s 2"],
    sampler: Sampler,
    sampling: RowSampling | None,
    routes: UInt[Array, "p t l k"] | None,
) -> Prefix:
    """Runs prompts once for all their samples and draws the first token of each."""
    (last, cache, routes), _ = encode(model, rollout, params, tokens, lengths, routes)
    token, logp, entropy, top = _first(model, params, last, lengths, keys, sampler, sampling)
    return Prefix(cache, tokens, lengths, routes, keys, token, logp, entropy, sampling, top)


def extended(
    model: Transformer, params, state: DecodeState, extension: Extension, sampler: Sampler
) -> Prefix:
    """Runs the new tokens of a sequence after the keys in its slot, and draws its next token."""
    slot, tokens, new, known, length, keys, sampling = extension
    size = len(tokens)
    assert len(new) < size, "attention would take the new tokens for the whole sequence"

    def row(x):
        """[.. slots kv t d] -> [.. 1 kv size d]"""
        return jnp.take(x, slot[None], axis=x.ndim - 4, mode="clip")[..., :size, :]

    positions = known + jnp.arange(len(new), dtype=jnp.int32)[None]
    cache = lay_cache(model.placement, jax.tree.map(row, state.cache), 1)
    out = apply(model, params, new[None], positions, mask=positions < length, cache=cache)
    last = jnp.take(out.hidden, jnp.reshape(length - known - 1, (1,)), axis=1, mode="clip")[:, 0]
    assert out.cache is not None
    routes = None
    if state.routes is not None:
        assert out.routes is not None
        before = jnp.take(state.routes, slot[None], axis=0, mode="clip")[:, :size]
        routes = before.reshape(*before.shape[:2], *out.routes.shape[2:])
        routes = routes.at[:, positions[0]].set(out.routes.astype(routes.dtype), mode="drop")
    cache, n = lay_cache(model.placement, out.cache, 1), length[None]
    token, logp, entropy, top = _first(model, params, last, n, keys, sampler, sampling)
    return Prefix(cache, tokens[None], n, routes, keys, token, logp, entropy, sampling, top)


def _first(model: Transformer, params, last, lengths, keys, sampler: Sampler, sampling):
    """Returns the first token of each sample, its log-prob and entropy, and the top log-probs."""
    p, s = keys.shape[:2]
    logits = next_logits(model, params, last, sampler)
    each = jax.tree.map(lambda x: for_samples(x, s), sampling)
    # A prompt's samples have the same logits and differ in their keys.
    logits = for_samples(logits, s)
    drawn = sample(
        logits,
        keys.reshape(p * s, 2),
        for_samples(lengths, s),
        sampler,
        each,
        model.known,
    )
    token, logp, entropy = (x.reshape(p, s) for x in drawn)
    top = None
    if sampler.top_logprobs:
        likeliest = top_logprobs(logits, drawn[0], sampler.top_logprobs, model.known)
        top = jax.tree.map(lambda x: x.reshape(p, s, -1), likeliest)
    return token, logp, entropy, top


def prompt_logprobs(
    model: Transformer,
    rollout: RolloutConfig,
    params,
    tokens: Int[Array, "1 t"],
    lengths: Int[Array, "1"],
    most: int,
) -> TopLogprobs:
    """Returns `[t k]`: row i has the log-probs of token i given the tokens before it; the first row
    has only its id. Rows beyond the length are undefined.
    """

    def of_rows(hidden, following):
        logits = next_logits(model, params, hidden, Sampler())
        return top_logprobs(logits, following, most, model.known)

    def of_piece(hidden, following):
        return jax.tree.map(lambda x: x[None], in_rows(of_rows, hidden[0], following[0]))

    following = jnp.roll(tokens, -1, axis=1)
    _, rows = encode(model, rollout, params, tokens, lengths, None, of_piece, following)
    # the last row belongs to the token after the prompt
    ids, logp = (jnp.pad(x[0, :-1], ((1, 0), (0, 0))) for x in rows)
    return TopLogprobs(ids.at[0, 0].set(tokens[0, 0]), logp)


def encode(
    model: Transformer,
    rollout: RolloutConfig,
    params,
    tokens,
    lengths,
    routes,
    of_piece=None,
    following: Tree = None,
):
    """Returns ((hidden state of each prompt's last token, cache, routes), rows), computed in pieces
    of `prefill_chunk` tokens, which bounds the attention scores.

    rows: the results `[p t ...]` of `of_piece` for the hidden states `[p n d]` of each piece and
    its part of `following`, a tree of arrays `[p t]`; None without it.
    """
    p, t = tokens.shape
    size = min(t, rollout.prefill_chunk)
    n = -(-t // size)

    def pieces(x):
        """[p t ...] -> [n p size ...]"""
        x = jnp.pad(x, ((0, 0), (0, n * size - t), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(p, n, size, *x.shape[2:]), 1, 0)

    def joined(x):
        """[n p size ...] -> [p t ...]"""
        return jnp.moveaxis(x, 0, 1).reshape(p, n * size, *x.shape[3:])[:, :t]

    def piece(carry, inputs):
        cache, last = carry
        i, tokens, routes, following = inputs
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
        # The last token's place in this piece; `ends` counts only in the piece that has it.
        at = jnp.maximum(lengths - 1, 0) - i * size
        ends = jnp.take_along_axis(out.hidden, jnp.clip(at, 0, size - 1)[:, None, None], axis=1)[
            :, 0
        ]
        rows = None if of_piece is None else of_piece(out.hidden, following)
        return (out.cache, jnp.where((at // size == 0)[:, None], ends, last)), (
            out.routes,
            rows,
        )

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
        jax.tree.map(pieces, following),
    )
    if n == 1:  # no scan, which would be compiled as a loop
        (cache, last), (used, rows) = piece(start, jax.tree.map(lambda x: x[0], inputs))
        return (last, lay_cache(model.placement, cache, p), used), rows
    (cache, last), (used, rows) = jax.lax.scan(piece, start, inputs)
    used, rows = jax.tree.map(joined, (used, rows))
    cache = lay_cache(model.placement, jax.tree.map(lambda x: x[..., :t, :], cache), p)
    return (last, cache, used), rows


def for_samples(x: Array, s: int) -> Array:
    """Returns `x` `[p ...]` of prompts, repeated for each of their `s` samples: `[p*s ...]`."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], s, *x.shape[1:])).reshape(-1, *x.shape[1:])
