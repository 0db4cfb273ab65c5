"""The TPU's decode attention (Pallas): one query per slot over keys read in place, in rows or in
pages.

Blocks of keys come through the block table, as in PagedAttention (arXiv 2309.06180), with a running
softmax (FlashAttention-2, 2307.08691). Blocks past a slot's length, and before its sliding window,
are neither fetched nor computed, and a slot of length 0 has none: the cost of a step follows the
live sequences.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from compass_jax.devices.sharding import Placement
from compass_jax.model import kernels

_HIDDEN = -1e30  # a masked score; finite, so that a block without a visible key gives no NaN
_LARGEST = 4096  # tokens of the largest block of a cache without pages
_BLOCK_BYTES = 8 * 2**20  # VMEM for blocks of keys and values, two of each at a time


def decode_attention(
    q: Float[Array, "b kv g d"],
    k: Float[Array, "l n kv s d"],
    v: Float[Array, "l n kv s d"],
    lengths: Int[Array, "b"],
    table: Int[Array, "b m"] | None,
    layer: Int[Array, ""],
    placement: Placement | None,
    window: int = 0,
    sinks: Float[Array, "h"] | None = None,
) -> Float[Array, "b kv g d"]:
    """Computes softmax(q k^T) v over the first `lengths` keys of each slot in `layer`, of which the
    last `window` (0: all); `sinks` are one more score per head in the softmax's denominator. q is
    scaled by the caller. A slot of length 0 reads nothing, and its output is 0.

    Without a table, row i of the cache belongs to slot i. With one, page j of slot i is `table[i,
    j]` (only pages below its length are read); over a mesh page ids count within the part of the
    pages on the slot's device.
    """
    run = partial(_decode, window=window, interpret=kernels.INTERPRET)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(*q.shape[1:3], 1)
    if placement is None:
        return run(q, k, v, lengths, table, layer, sinks)
    rows = placement.batch_axes(q.shape[0]) or None
    queries, keys = P(rows, "tensor"), P(None, rows, "tensor")
    specs = (queries, keys, keys, P(rows), None if table is None else P(rows), P(), P("tensor"))
    return jax.shard_map(
        run, mesh=placement.mesh, in_specs=specs, out_specs=queries, check_vma=False
    )(q, k, v, lengths, table, layer, sinks)


def _decode(q, k, v, lengths, table, layer, sinks, *, window: int, interpret: bool):
    b, kv, g, d = q.shape
    positions = k.shape[3]
    if table is None:
        size = block_tokens(positions, kv * d * k.dtype.itemsize)
        blocks, table = positions // size, jnp.zeros((1, 1), jnp.int32)  # not read
        where = _own_row
    else:
        size, blocks, where = positions, table.shape[1], _page
    scalars = (
        lengths.astype(jnp.int32),
        # Parts of a slot without a page have an index out of range, which must not be fetched.
        jnp.clip(table, 0, k.shape[1] - 1).astype(jnp.int32),
        layer.reshape(1).astype(jnp.int32),
        _read_slots(lengths),
    )
    one = pl.BlockSpec((None, kv, g, d), lambda i, j, *_: (i, 0, 0, 0))
    keys = pl.BlockSpec((None, None, kv, size, d), partial(where, size, window))
    per_head = pl.BlockSpec((kv, g, 1), lambda *_: (0, 0, 0))
    arrays, specs = [q, k, v], [one, keys, keys]
    if sinks is not None:
        arrays, specs = [sinks, *arrays], [per_head, *specs]
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(b, blocks),
        in_specs=specs,
        out_specs=one,
        scratch_shapes=[pltpu.VMEM((kv, g, n), jnp.float32) for n in (1, 1, d)],
    )
    call = pl.pallas_call(
        partial(
            _kernel_without_sinks if sinks is None else _kernel,
            size=size,
            blocks=blocks,
            window=window,
        ),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        # Slots do not depend on each other: a chip of two cores gives each core half of them.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )
    return call(*scalars, *arrays)


def block_tokens(positions: int, token_bytes: int) -> int:
    """Returns the tokens of a block of rows with `positions` positions, whose keys take
    `token_bytes` a token.

    Every block is a step of the grid, which costs a fraction of a microsecond whatever its size, so
    blocks are as large as VMEM allows. `positions` is a multiple of 128.
    """
    room = _BLOCK_BYTES // (4 * token_bytes)
    sizes = (_LARGEST >> i for i in range(6))
    return next(n for n in sizes if n == 128 or (n <= room and positions % n == 0))


def _first_key(window: int, length):
    return jnp.maximum(length - window, 0) if window else 0


def _read_slots(lengths: Int[Array, "b"]) -> Int[Array, "b"]:
    """Returns the slot whose keys lie in VMEM at each slot's turn: its own, or for a slot of length
    0 that of the live one before it, else after it.
    """
    slots = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    before = jax.lax.cummax(jnp.where(lengths > 0, slots, -1))
    return jnp.where(before < 0, jnp.argmax(lengths > 0).astype(jnp.int32), before)


def _needed(size: int, window: int, i, j, lengths, slots):
    """Returns slot i and its block j, or the nearest ones that are needed: that block is already in
    VMEM, or will be used, and so no other is fetched.
    """
    slot = slots[i]
    last = jnp.maximum(lengths[slot] - 1, 0) // size
    j = jnp.where(slot == i, j, jnp.where(slot > i, 0, last))
    return slot, jnp.clip(j, _first_key(window, lengths[slot]) // size, last)


def _own_row(size: int, window: int, i, j, lengths, table, layer, slots):
    """Returns the index of block j of row i."""
    slot, block = _needed(size, window, i, j, lengths, slots)
    return layer[0], slot, 0, block, 0


def _page(size: int, window: int, i, j, lengths, table, layer, slots):
    slot, block = _needed(size, window, i, j, lengths, slots)
    return layer[0], table[slot, block], 0, 0, 0


def _kernel_without_sinks(lengths, table, layer, slots, *arrays, **sizes):
    _kernel(lengths, table, layer, slots, None, *arrays, **sizes)


def _kernel(
    lengths,
    table,
    layer,
    slots,
    sinks,
    q,
    k,
    v,
    out,
    largest,
    total,
    weighed,
    *,
    size: int,
    blocks: int,
    window: int,
):
    i, j = pl.program_id(0), pl.program_id(1)

    @pl.when(j == 0)
    def _():
        if sinks is None:
            largest[...] = jnp.full(largest.shape, _HIDDEN, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
        else:  # exp(sink - largest) = 1
            largest[...] = sinks[...]
            total[...] = jnp.ones(total.shape, jnp.float32)
        weighed[...] = jnp.zeros(weighed.shape, jnp.float32)

    first = _first_key(window, lengths[i])

    @pl.when((j * size < lengths[i]) & ((j + 1) * size > first))
    def _():
        scores = jax.lax.dot_general(
            q[...], k[...], (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
        )
        at = j * size + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
        scores = jnp.where((at < lengths[i]) & (at >= first), scores, _HIDDEN)
        top = jnp.maximum(largest[...], jnp.max(scores, axis=2, keepdims=True))
        # `keep` rescales the sums over earlier blocks to the new maximum.
        weights, keep = jnp.exp(scores - top), jnp.exp(largest[...] - top)
        partial_out = jax.lax.dot_general(
            weights.astype(v.dtype),
            v[...],
            (((2,), (1,)), ((0,), (0,))),
            preferred_element_type=jnp.float32,
        )
        largest[...], total[...] = top, total[...] * keep + jnp.sum(weights, axis=2, keepdims=True)
        weighed[...] = weighed[...] * keep + partial_out

    @pl.when(j == blocks - 1)
    def _():
        # without a key (and a sink) both are 0
        out[...] = (weighed[...] / jnp.where(total[...] > 0, total[...], 1)).astype(out.dtype)
