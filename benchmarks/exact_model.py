"""A model whose tokens are computed alike in every program, for benchmarks/exact.py.

`install` replaces functions of the package in this process: products, norms, router and log-probs
run on ROWS tokens at a time, experts in blocks of ROWS rows, attention in blocks of ROWS keys from
the first one on. The sums of attention are products with ones: XLA orders a reduction by the
shape of its operand, a product of 2 to 32 rows always alike. A gradient is that of the default
computation at the same inputs and routes. Over a mesh each device computes whole rows. Layers must
be mixtures of experts without windows, sinks and biases, and rows whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from compass_jax.model import attention, layer, logprobs, runs, transformer
from compass_jax.model.experts import cpu
from compass_jax.model.experts.dispatch import sorted_dispatch
from compass_jax.model.moe import route, routing_dtype, unset_id
from compass_jax.model.precision import at_least_float32
from compass_jax.rollout import decode, prefill, sampling, state
from compass_jax.training import step

ROWS = 32  # rows of a tile, and keys of a block of attention
_default_layer, _default_norm = layer.layer, attention.rms_norm
_default_logprobs = step.token_logprobs


def by_tiles(function: Callable[..., Any], *rows: Any) -> Any:
    """Calls `function` on ROWS rows of the arrays `[n ...]` at a time, in a loop: each program
    then compiles the same body.
    """
    n = rows[0].shape[0]
    tiles = max(2, -(-n // ROWS))  # XLA removes a loop around a single tile
    pad = tiles * ROWS - n
    padded = tuple(jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))) for x in rows)
    shapes = jax.eval_shape(function, *(x[:ROWS] for x in padded))
    start = jax.tree.map(lambda s: jnp.zeros((n + pad, *s.shape[1:]), s.dtype), shapes)

    def one(i, out):
        new = function(*(jax.lax.dynamic_slice_in_dim(x, i * ROWS, ROWS) for x in padded))
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i * ROWS, 0), out, new
        )

    return jax.tree.map(lambda x: x[:n], jax.lax.fori_loop(0, tiles, one, start))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_gradient_of(default: Callable[..., Any], function: Callable[..., Any], *args):
    return function(*args)


_with_gradient_of.defvjp(
    lambda default, function, *args: (function(*args), args),
    lambda default, function, args, g: jax.vjp(default, *args)[1](g),
)


def attend(q, k, v, positions):
    """Computes attention of q `[b kv g t d]` to k, v `[b kv s d]` up to each query's position
    `[b t]`, in blocks of keys (online softmax, arXiv 2307.08691). A block that a query does not see
    leaves its sums unchanged, so that the length of the cache does not matter.
    """
    b, kv, g, t, d = q.shape
    size = max(-(-2 // g), min(t, ROWS // g))  # a product of one row takes another kernel
    pad, tail = -t % size, -k.shape[2] % ROWS
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, tail), (0, 0))) for x in (k, v))
    q = jnp.pad(q, ((0, 0),) * 3 + ((0, pad), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, pad)))

    def tile(i, out):
        part = jax.lax.dynamic_slice_in_dim(q, i * size, size, 3).reshape(b, kv, g * size, d)
        at = jax.lax.dynamic_slice_in_dim(positions, i * size, size, 1)
        new = _over_keys(part, k, v, at, g).reshape(b, kv, g, size, -1)
        return jax.lax.dynamic_update_slice_in_dim(out, new, i * size, 3)

    out = jnp.zeros((b, kv, g, t + pad, v.shape[-1]), q.dtype)
    return jax.lax.fori_loop(0, (t + pad) // size, tile, out)[:, :, :, :t]


def _over_keys(q, k, v, positions, g: int):
    """Computes `attend` of one tile `[b kv m d]`: row h * n + i of m is query i of head h."""
    wide, (b, kv, m, _) = at_least_float32(q.dtype), q.shape
    lowest = jnp.array(-0.7 * float(jnp.finfo(wide).max), wide)
    product = partial(jnp.einsum, preferred_element_type=wide)
    ones = jnp.ones((ROWS, 8), q.dtype)

    def block(j, carry):
        top, total, out = carry
        keys, values = (jax.lax.dynamic_slice_in_dim(x, j * ROWS, ROWS, 2) for x in (k, v))
        at = j * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
        sees = jnp.tile(at[None, None] <= positions[:, :, None], (1, g, 1))[:, None]
        scores = jnp.where(sees, product("bkqd,bksd->bkqs", q, keys), lowest)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights, scale = jnp.exp(scores - new_top).astype(q.dtype), jnp.exp(top - new_top)
        total = total * scale + product("bkqs,so->bkqo", weights, ones)[..., :1]
        return new_top, total, out * scale + product("bkqs,bksd->bkqd", weights, values)

    start = jnp.full((b, kv, m, 1), lowest), jnp.zeros((b, kv, m, 1), wide)
    start = *start, jnp.zeros((b, kv, m, v.shape[-1]), wide)
    blocks = (jnp.max(positions) // ROWS + 1).astype(jnp.int32)
    _, total, out = jax.lax.fori_loop(jnp.int32(0), blocks, block, start)
    return (out / total).astype(q.dtype)


def _forward(config, shared, x, params, routes, cache):
    """Runs one decoder layer on one device's rows; returns (x, cache, ids, statistics)."""
    tables, positions, mask, *_ = shared
    (b, t, d), dtype, wide = x.shape, x.dtype, at_least_float32(x.dtype)
    n, flat, moe, eps = b * t, mask.reshape(b * t), config.mixture, config.norm_eps
    weights = jax.tree.map(lambda w: w.astype(dtype), params)
    mlp = weights["mlp"]

    def before(x, cos, sin):
        y = _default_norm(x, weights["attention_norm"], eps)[None]
        q, k, v = attention._heads(y, weights["attention"], (cos[None], sin[None]), config, None)
        return q[0] / config.head_dim**0.5, k[0], v[0]

    angles = (y.reshape(n, *y.shape[2:]) for y in tables)
    q, k, v = (y.reshape(b, t, *y.shape[1:]) for y in by_tiles(before, x.reshape(n, d), *angles))
    seen = attention.LayerCache(k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
    if cache is not None:
        cache, seen = attention._write_both(cache, k, v, positions, None, None)
    q = q.transpose(0, 2, 1, 3).reshape(b, config.kv_heads, -1, t, config.head_dim)
    heads = attend(q, *seen, positions).reshape(b, config.heads, t, -1).transpose(0, 2, 1, 3)
    recorded = () if routes is None else (routes.reshape(n, -1),)

    def after(x, heads, mask, *recorded):
        x = x + heads @ weights["attention"]["o"]
        y = _default_norm(x, weights["mlp_norm"], eps)
        logits = jnp.matmul(y.astype(wide), mlp["router"].astype(wide), precision="highest")
        ids, gates, _ = route(logits, *(recorded or (None,)), mask, moe)
        return x, y, logits, ids, gates.astype(dtype)

    x, y, logits, ids, gates = by_tiles(
        after, x.reshape(n, d), heads.reshape(n, -1), flat, *recorded
    )
    gate_up = mlp["gate_up"] if "gate_up" in mlp else jnp.concatenate([mlp["gate"], mlp["up"]], -1)
    dispatch = sorted_dispatch(jnp.where(flat[:, None], ids, moe.experts).reshape(-1), moe.experts)
    # each pair of a token and a choice is a row with the gate 1
    pairs, ones = jnp.repeat(y, moe.top_k, axis=0), jnp.ones((n * moe.top_k, 1), dtype)
    blocks = cpu.Blocks(ROWS, 1)
    out, _ = cpu.sized_forward(pairs, ones, (gate_up,), mlp["down"], dispatch, blocks)

    def combined(x, out, gates):
        for choice in range(moe.top_k):
            x = x + out[:, choice] * gates[:, choice, None]
        return x

    x = by_tiles(combined, x, out.reshape(n, moe.top_k, d), gates).reshape(b, t, d)
    kind = routing_dtype(moe.experts)
    record = jnp.where(flat[:, None], ids, unset_id(kind)).astype(kind)
    _, _, stats = route(logits, *(recorded or (None,)), flat, moe)
    return x, cache, record.reshape(b, t, -1), stats


def _over_rows(forward: Callable[..., Any], placement, count: int) -> Callable[..., Any]:
    """Returns `forward` on each device's rows, of `count`, with all weights."""
    axes = placement.batch_axes(count)
    rows = P(axes or None)

    def local(*arrays):
        x, cache, ids, stats = forward(*arrays)
        return x, cache, ids, jax.tree.map(lambda y: jax.lax.psum(y, axes), stats)

    return jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(rows, rows, P(), rows, rows),
        out_specs=(rows, rows, rows, P()),
        check_vma=False,
    )


@partial(jax.jit, static_argnames=("settings", "is_moe", "window"))
def _layer(settings, shared, x, params, is_moe, routes, cache, window):
    """Replaces `layer.layer`."""
    forward = partial(_forward, settings.config)
    if settings.placement is not None:
        forward = _over_rows(forward, settings.placement, x.shape[0])
    if cache is not None:
        return forward(shared, x, params, routes, cache)
    x, ids, stats = _trained(forward, settings, shared, x, params, routes)
    return x, None, ids, stats


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _trained(forward, settings, shared, x, params, routes):
    x, _, ids, stats = forward(shared, x, params, routes, None)
    return x, ids, stats


def _trained_fwd(forward, settings, shared, x, params, routes):
    out = _trained(forward, settings, shared, x, params, routes)
    return out, (shared, x, params, out[1])


def _trained_bwd(forward, settings, saved, cotangents):
    shared, x, params, ids = saved

    def default(x, params):
        x, _, _, stats = _default_layer(settings, shared, x, params, True, ids, None, 0)
        return x, stats

    return None, *jax.vjp(default, x, params)[1]((cotangents[0], cotangents[2])), None


_trained.defvjp(_trained_fwd, _trained_bwd)


def _norm(x, scale, eps: float):
    """Replaces `rms_norm` of the transformer: the final norm."""

    def exact(x, scale):
        tile = partial(_default_norm, scale=scale, eps=eps)
        return by_tiles(tile, x.reshape(-1, x.shape[-1])).reshape(x.shape)

    return _with_gradient_of(partial(_default_norm, eps=eps), exact, x, scale)


def _normed(settings, x, scale, part: str):
    """Replaces `layer._normed`, so that default layers have default norms."""
    return _default_norm(x, scale, settings.config.norm_eps)


def _logits(hidden, head):
    """Replaces `logits_of` of the rollout."""
    return by_tiles(lambda rows: logprobs.logits_of(rows, head), hidden)


def _chosen(logits, tokens, temperature: float, known: int | None):
    """Computes (logp, entropy) of tokens `[n]` under logits `[n v]`."""
    head_of = logprobs._Head(ROWS, known, None)
    return by_tiles(lambda *rows: head_of(*rows, temperature), logits, tokens)


def _sample(logits, keys, positions, sampler, each=None, known=None):
    """Replaces `sample` of the rollout."""
    token, *_ = sampling.sample(logits, keys, positions, sampler, each, known)
    return token, *_chosen(logits, token, sampler.temperature or 1.0, known)


def _token_logprobs(hidden, head, tokens, temperature, chunk, placement, known, predicted):
    """Replaces `token_logprobs` of training."""

    def exact(hidden, head):
        rows, targets = hidden[:, :-1], tokens[:, 1:].reshape(-1)
        logits = _logits(rows.reshape(-1, rows.shape[-1]), head)
        out = (x.reshape(rows.shape[:2]) for x in _chosen(logits, targets, temperature, known))
        return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in out)

    def default(hidden, head):
        return _default_logprobs(
            hidden, head, tokens, temperature, chunk, placement, known, predicted
        )

    return _with_gradient_of(default, exact, hidden, head)


def install() -> None:
    """Replaces the package's functions, before the first program is traced."""
    for module, name, function in (
        (runs, "layer", _layer),
        (transformer, "rms_norm", _norm),
        (layer, "_normed", _normed),
        (state, "logits_of", _logits),
        (decode, "sample", _sample),
        (prefill, "sample", _sample),
        (step, "token_logprobs", _token_logprobs),
    ):
        setattr(module, name, function)
