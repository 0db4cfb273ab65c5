"""Grouped-query attention with rotary positions and optional QK norm, or multi-head latent
attention, with or without a KV cache. The cache of latent attention has the expanded keys and
values of every head, so that all that reads a cache reads it alike.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from compass_jax.base.aliases import Tree
from compass_jax.config import MLAConfig, ModelConfig
from compass_jax.devices.sharding import Placement, constrain
from compass_jax.model.kernels import (
    cudnn_causal,
    cudnn_fits,
    decode_fits,
    splash_causal,
    splash_fits,
    whole_lanes,
)
from compass_jax.model.precision import at_least_float32
from compass_jax.model.quantize import Quantized, kind_of, matmul, quantize
from compass_jax.model.rope import apply_rope, deinterleaved, score_factor
from compass_jax.model.stacks import InStack


class LayerCache(NamedTuple):
    """Keys and values of one decoder layer, `[b kv s d]`: heads before positions, so that a read is
    one batched matmul. 8-bit ones have scales. Values may be of another width than keys.
    """

    k: Float[Array, "b kv s d"] | Quantized
    v: Float[Array, "b kv s v"] | Quantized


LATENT_EPS = 1e-6  # of the norms of latent vectors; config.json has no key for it


def rms_norm(x: Float[Array, "*n d"], scale: Float[Array, "d"], eps: float) -> Float[Array, "*n d"]:
    """Computes x / rms(x) * scale, with the mean square in at least float32."""
    wide = x.astype(at_least_float32(x.dtype))
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype).reshape(
        (1,) * (x.ndim - 1) + (-1,)
    )


def _project(x, params, name: str, heads: int):
    y = matmul(x, params[name])
    if f"{name}_bias" in params:
        y = y + params[f"{name}_bias"].astype(x.dtype)[None, None, :]
    return y.reshape(*x.shape[:2], heads, -1)


def _attend(
    q: Float[Array, "b kv g t d"],
    cache: LayerCache,
    visible: Bool[Array, "#b t s"],
    sinks: Float[Array, "h"] | None = None,
) -> Float[Array, "b kv g t v"]:
    """Computes softmax(q k^T) v without repeating keys; q is scaled by the caller. Masked scores
    are a large negative finite number, so that no row is NaN. `sinks` are as in `_softmax`.
    """
    wide = at_least_float32(q.dtype)
    b, kv, g, t, d = q.shape
    k, v = (x.values.astype(q.dtype) if isinstance(x, Quantized) else x for x in cache)
    # The g queries that share a key head are rows of one product.
    flat = q.reshape(b, kv, g * t, d)
    scores = jnp.einsum("bkqd,bksd->bkqs", flat, k, preferred_element_type=wide)
    # Scaling the scores takes fewer operations than scaling the cache's entries.
    if isinstance(cache.k, Quantized):
        scores = scores * cache.k.scales.astype(wide).transpose(0, 1, 3, 2)
    scores = jnp.where(
        visible[:, None, None],
        scores.reshape(b, kv, g, t, -1),
        jnp.array(-0.7 * float(jnp.finfo(wide).max), wide),
    )
    weights = _softmax(scores, sinks).reshape(b, kv, g * t, -1)
    if isinstance(cache.v, Quantized):
        weights = weights * cache.v.scales.astype(wide).transpose(0, 1, 3, 2)
    return jnp.einsum("bkqs,bksd->bkqd", weights.astype(q.dtype), v).reshape(b, kv, g, t, -1)


def _softmax(
    scores: Float[Array, "b kv g t s"], sinks: Float[Array, "h"] | None
) -> Float[Array, "b kv g t s"]:
    """Computes exp(s_i) / (sum_j exp(s_j) + exp(sink)) with one sink per head (gpt-oss); without
    sinks the plain softmax.
    """
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = sinks.astype(scores.dtype).reshape(1, *scores.shape[1:3], 1, 1)
    # The sink takes part in the maximum, or exp(sink - top) could overflow. The shift by `top`
    # cancels in the quotient, so it needs no gradient.
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink)
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - top))


# smallest number of queries in a chunk, and largest number of chunks in a sequence
CHUNK, MAX_CHUNKS = 32, 8


def _causal(
    q: Float[Array, "b kv g t d"],
    new: LayerCache,
    segments: Int[Array, "b t"] | None,
    window: int = 0,
    sinks: Float[Array, "h"] | None = None,
) -> Float[Array, "b kv g t v"]:
    """Computes attention within rows, or within their segments, by chunks of queries. A chunk skips
    the keys after it, nearly half of all scores, and those before its window.
    """
    k, v = _arrays(new)
    t = q.shape[3]
    size, out = max(CHUNK, -(-t // MAX_CHUNKS)), []
    for first in range(0, t, size):
        last = min(t, first + size)
        start = max(0, first + 1 - window) if window else 0
        queries = q[:, :, :, first:last]
        seen = LayerCache(k[:, :, start:last], v[:, :, start:last])
        visible = _visible(np.arange(first, last)[:, None], np.arange(start, last)[None], window)
        allowed = jnp.asarray(visible)[None]
        if segments is not None:
            allowed = allowed & (segments[:, first:last, None] == segments[:, None, start:last])
        out.append(_attend(queries, seen, allowed, sinks))
    return out[0] if len(out) == 1 else jnp.concatenate(out, axis=3)


def _causal_unchunked(
    q: Float[Array, "b kv g t d"],
    new: LayerCache,
    window: int = 0,
    sinks: Float[Array, "h"] | None = None,
) -> Float[Array, "b kv g t v"]:
    """Computes attention within rows in one piece, for queries split over devices: chunks would
    cross the split.
    """
    at = jnp.arange(q.shape[3])
    return _attend(q, new, _visible(at[:, None], at[None], window)[None], sinks)


def _visible(queries, keys, window: int):
    """Returns which of the positions `keys` a query at each of the positions `queries` sees: its
    own and those before it, at most `window` (0: all).
    """
    visible = keys <= queries
    return visible & (keys > queries - window) if window else visible


def attention(
    x: Float[Array, "b t m"],
    params,
    tables,
    positions: Int[Array, "b t"],
    config: ModelConfig,
    cache: LayerCache | InStack | None,
    placement: Placement | None = None,
    kernel: str = "portable",
    table: Int[Array, "b n"] | None = None,
    segments: Int[Array, "b t"] | None = None,
    window: int = 0,
    mask: Bool[Array, "b t"] | None = None,
) -> tuple[Float[Array, "b t m"], LayerCache | InStack | None]:
    """Computes causal self-attention.

    Without a cache a token sees the earlier tokens of its row, or of its segment if `segments`
    is given (the row is then whole on its device). With a cache, the row's keys and values are
    written at `positions` and a token sees the cache's positions up to its own. Positions past the
    cache are dropped.

    Args:
        kernel: "splash" or "cudnn" for rows without a cache, or that fill it (their positions then
            count from 0), at lengths that the kernels accept; "splash" for one query per row too.
            cuDNN takes neither segments nor sinks.
        table: block table of a paged cache; needs one query per row and uses the kernel.
        window: number of positions that a token sees, its own included; 0: all before it.
        mask: False for a query whose output nobody needs: the kernel that reads the cache in place
            reads no key for it, and returns 0.
    """
    project = _heads if config.mla is None else _latent_heads
    q, k, v = project(x, params, tables, config, placement)
    sinks, (b, t) = params.get("sinks"), x.shape[:2]
    # [b kv g t d]: consecutive query heads share a key head.
    q = q.transpose(0, 2, 1, 3).reshape(b, config.kv_heads, -1, t, config.head_dim)
    # Scaled here once, because the kernels below apply no scale.
    q = q * (score_factor(config) / config.head_dim**0.5)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    new = LayerCache(keys, values)
    if cache is not None:
        cache, seen = _write_both(cache, k, v, positions, table, placement)
    # 8-bit keys are read from the cache, with their rounding.
    rows = cache is None or (not isinstance(seen.k, Quantized) and seen.k.shape[2] == t)
    if rows and kernel == "splash" and splash_fits(t, config.value_dim, placement):
        queries, keys = (whole_lanes(y) for y in (q.reshape(b, config.heads, t, -1), keys))
        out = splash_causal(queries, keys, values, placement, segments, window, sinks)
    elif rows and kernel == "cudnn" and _cudnn_takes(config, t, x.dtype, placement, segments):
        out = cudnn_causal(q.reshape(b, config.heads, t, -1), keys, values, placement, window)
    elif cache is None:
        split = placement is not None and placement.token_axis(t) is not None
        out = (
            _causal_unchunked(q, new, window, sinks)
            if split
            else _causal(q, new, segments, window, sinks)
        )
    elif table is not None or (kernel == "splash" and t == 1 and takes_kernel(cache, False)):
        read = positions[:, 0] + 1
        lengths = read if mask is None else jnp.where(mask[:, 0], read, 0)
        out = _by_kernel(q, cache, lengths, table, placement, window, sinks)
    else:
        at = jnp.arange(seen.k.shape[2], dtype=positions.dtype)
        out = _attend(q, seen, _visible(positions[:, :, None], at[None, None, :], window), sinks)
    out = out.reshape(b, config.heads, t, config.value_dim)
    out = matmul(out.transpose(0, 2, 1, 3).reshape(b, t, -1), params["o"])
    if config.o_bias:
        out = out + params["o_bias"].astype(x.dtype)[None, None, :]
    return out, cache


def _cudnn_takes(config: ModelConfig, t: int, dtype, placement, segments) -> bool:
    """Returns whether `cudnn_causal` computes attention of this model over such rows."""
    is_plain = segments is None and not config.attention_sinks
    same_width = config.head_dim == config.value_dim
    return is_plain and same_width and cudnn_fits(t, config.head_dim, dtype, placement)


def _heads(x, params, tables, config: ModelConfig, placement: Placement | None):
    """Computes queries, keys and values `[b t heads d]` at their positions, with QK norm where the
    model has it.
    """
    q = _project(x, params, "q", config.heads)
    k = _project(x, params, "k", config.kv_heads)
    v = _project(x, params, "v", config.kv_heads)
    if config.qk_norm:
        q, k = (_qk_norm(x, params[f"{name}_norm"], config) for x, name in ((q, "q"), (k, "k")))
    q, k = apply_rope(q, tables), apply_rope(k, tables)
    q = constrain(placement, q, "batch", "tokens", "heads", None)
    # Keys and values of all tokens, also where queries are split over devices.
    k, v = (constrain(placement, y, "batch", None, "kv_heads", None) for y in (k, v))
    return q, k, v


def _latent_heads(x, params, tables, config: ModelConfig, placement: Placement | None):
    """Computes queries, keys and values `[b t heads d]` at their positions from latent vectors
    (MLA, arXiv 2412.19437, section 2.1.1).
    """
    assert config.mla is not None
    mla, unturned = config.mla, config.head_dim - config.mla.rope_dim
    heads = *x.shape[:2], config.heads, -1
    latent, turned = jnp.split(matmul(x, params["kv_a"]), [mla.kv_rank], axis=-1)
    latent = rms_norm(latent, params["kv_a_norm"], LATENT_EPS)
    # All tokens' keys are needed, also where queries are split over devices: the latent vectors are
    # gathered, which are narrower than the keys and values expanded from them.
    latent = constrain(placement, latent, "batch", None, None)
    k, v = jnp.split(matmul(latent, params["kv_b"]).reshape(heads), [unturned], axis=-1)
    turned = _turned(turned[:, :, None], tables, mla)
    # All heads share the rotary part of the key.
    k = jnp.concatenate([k, jnp.broadcast_to(turned, (*k.shape[:3], mla.rope_dim))], axis=-1)
    queries = x
    if mla.q_rank:
        queries = rms_norm(matmul(x, params["q_a"]), params["q_a_norm"], LATENT_EPS)
    q = matmul(queries, params["q_b" if mla.q_rank else "q"]).reshape(heads)
    first, last = jnp.split(q, [unturned], axis=-1)
    q = jnp.concatenate([first, _turned(last, tables, mla)], axis=-1)
    q = constrain(placement, q, "batch", "tokens", "heads", None)
    k, v = (constrain(placement, y, "batch", None, "kv_heads", None) for y in (k, v))
    return q, k, v


def _turned(x: Float[Array, "b t h r"], tables, mla: MLAConfig) -> Float[Array, "b t h r"]:
    """Applies rotary embeddings. Interleaved channels are put in half-split order first, of queries
    and of keys alike, which leaves their products unchanged.
    """
    return apply_rope(deinterleaved(x) if mla.interleaved else x, tables)


def _qk_norm(x: Float[Array, "b t h d"], scale, config: ModelConfig) -> Float[Array, "b t h d"]:
    """Computes the norm of queries or keys, of each head or of all heads together."""
    if config.qk_norm_scope == "head":
        return rms_norm(x, scale, config.norm_eps)
    return rms_norm(x.reshape(*x.shape[:2], -1), scale, config.norm_eps).reshape(x.shape)


def _by_kernel(q, cache: LayerCache | InStack, lengths, table, placement, window: int, sinks):
    """Computes attention of one query per row with the kernel that reads the cache in place."""
    from compass_jax.model.decode_kernel import decode_attention

    if isinstance(cache, InStack):
        stack, layer = cache
    else:
        stack, layer = jax.tree.map(lambda y: y[None], cache), jnp.int32(0)
    k, v = _arrays(stack)
    out = decode_attention(q[:, :, :, 0], k, v, lengths, table, layer, placement, window, sinks)
    return out[:, :, :, None]


def _arrays(cache: LayerCache) -> tuple[Array, Array]:
    """Returns keys and values that are not in 8 bits."""
    assert not isinstance(cache.k, Quantized) and not isinstance(cache.v, Quantized)
    return cache.k, cache.v


def takes_kernel(cache: LayerCache | InStack, paged: bool) -> bool:
    """Returns whether the decode kernel can read this cache: its dtype, the size of its rows or
    pages and heads, and keys and values of one width.
    """
    k, v = cache.stack if isinstance(cache, InStack) else cache
    is_plain = not isinstance(k, Quantized) and k.shape == v.shape
    return is_plain and decode_fits(k.shape[-2], k.shape[-1], paged)


def _write_both(
    cache: LayerCache | InStack, k, v, positions, table, placement
) -> tuple[LayerCache | InStack, LayerCache]:
    """Writes new keys and values; returns the cache and one layer's part of it."""
    stack, layer = (cache, None) if isinstance(cache, LayerCache) else cache

    def write(stack, new, positions, table, layer):
        return jax.tree.map(
            lambda x, y: _write(x, y, positions, table, layer),
            stack,
            new,
            is_leaf=lambda x: isinstance(x, Quantized),
        )

    if table is not None and placement is not None:  # page ids count within a group of slots
        rows = placement.batch_axes(positions.shape[0]) or None
        pages = jax.tree.map(lambda x: P(*(None,) * (x.ndim - 4), rows, "tensor"), stack)
        of_new: Tree = P(rows, None, "tensor")
        specs = (
            pages,
            LayerCache(of_new, of_new),
            P(rows),
            P(rows),
            None if layer is None else P(),
        )
        write = jax.shard_map(
            write, mesh=placement.mesh, in_specs=specs, out_specs=pages, check_vma=False
        )
    stack = write(stack, LayerCache(k, v), positions, table, layer)
    if layer is None:
        return stack, stack
    cache = InStack(stack, layer)
    return cache, cache.part()


def _write(
    cache: Float[Array, "*n c kv s d"] | Quantized,
    new: Float[Array, "b t kv d"],
    positions: Int[Array, "b t"],
    table=None,
    layer=None,
):
    """Scatters each token's key or value to its position, in 8 bits where the cache is. Positions
    past the cache are dropped.

    Args:
        table: block table of a paged cache; positions without a page are dropped.
        layer: the layer to write in a stacked cache.
    """
    rows = jnp.arange(positions.shape[0])[:, None]
    if table is not None:
        # `no_page` is past the last page, where the write below is dropped.
        size, no_page = cache.shape[-2], cache.shape[-4]
        rows = jnp.take_along_axis(
            table, positions // size, axis=1, mode="fill", fill_value=no_page
        )
        positions = positions % size

    def put(buffer, values):
        at = (
            buffer.at[rows, :, positions] if layer is None else buffer.at[layer, rows, :, positions]
        )
        return at.set(values.astype(buffer.dtype), mode="drop", unique_indices=table is None)

    return jax.tree.map(
        put, cache, quantize(new, kind_of(cache), axis=-1) if isinstance(cache, Quantized) else new
    )
