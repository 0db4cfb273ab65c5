"""The KV cache of all slots: a contiguous range of positions for each slot, or pages that a table
assigns. Pure functions of arrays.

A cache is a tuple over layers, or over runs of layers whose axis comes first (compute.scan_decode).
An 8-bit cache has a leaf of scales for each leaf of values, with the same axes. `table` `[slots n]`
has the page of each page-sized part of a slot. Without a table a slot is one row of the cache. Over
a mesh each group of slots has separate pages, counted from 0, and functions of pages run on each
device separately (`shard_map`).

Without the kernel a generate call works on a copy of the positions that it may read, of all slots
up to the longest live sequence, and writes its part back. A decoding step that read through the
table, or a slice, would copy them at every token. So pages save memory between calls and beyond the
longest sequence; one long sequence makes the copy as large as a cache without pages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from compass_jax.base.aliases import Tree
from compass_jax.config import ComputeConfig, ConfigError, ModelConfig, RolloutConfig
from compass_jax.devices.sharding import Placement
from compass_jax.model.transformer import Cache, init_cache


def check_pages(rollout: RolloutConfig, groups: int) -> None:
    """Raises ConfigError if the pages cannot be split into equal and sufficient parts for `groups`
    groups of slots, each on separate devices.
    """
    pages, least = rollout.cache_pages, groups * rollout.pages_per_slot
    if pages % groups or 0 < pages < least:
        raise ConfigError(
            f"rollout.cache_pages = {pages}: {groups} groups of slots on devices of their own have"
            f" equal parts of the pages; it must be a multiple of {groups}, and at least {least},"
            " so that the longest sequence fits in each"
        )


def new_cache(
    config: ModelConfig, rollout: RolloutConfig, compute: ComputeConfig, groups: int = 1
) -> tuple[Cache, Int[Array, "slots n"] | None]:
    """Returns (an empty cache, its table): layers of `[slots kv t d]` and None, or with
    `rollout.cache_pages` of `[pages kv page d]` and no page assigned.

    groups: parts of the slots, each with an equal part of the pages.
    """
    if not rollout.cache_pages:
        return (
            init_cache(config, rollout.slots, rollout.max_length, compute, rollout.kv_quantize),
            None,
        )
    table = jnp.full(
        (rollout.slots, rollout.pages_per_slot), rollout.cache_pages // groups, jnp.int32
    )
    return (
        init_cache(config, rollout.cache_pages, rollout.page_tokens, compute, rollout.kv_quantize),
        table,
    )


def _each_layer(change: Callable[..., Array], *caches: Cache) -> Cache:
    """Applies `change` to each layer's leaves `[slots kv t d]`, stacked or not."""
    return jax.tree.map(
        lambda *leaves: (jax.vmap(change) if leaves[0].ndim == 5 else change)(*leaves), *caches
    )


def window(
    cache: Cache, table: Int[Array, "slots n"] | None, size: int, placement: Placement | None = None
) -> Cache:
    """Returns the first `size` positions of every slot, layers of `[slots kv size d]`. Positions
    without a page have arbitrary values, which attention masks.
    """
    if table is None:
        return jax.tree.map(lambda x: x[..., :size, :], cache)

    def gather(x, table):
        # [slots n kv page d]
        pages = jnp.take(x, table[:, : size // x.shape[2]], axis=0, mode="clip")
        return pages.transpose(0, 2, 1, 3, 4).reshape(table.shape[0], x.shape[1], size, x.shape[3])

    def local(cache, table):
        return _each_layer(partial(gather, table=table), cache)

    if placement is None:
        return local(cache, table)
    rows, heads = pages_spec(placement, table.shape[0], cache)
    return _by_group(placement, local, (heads, rows), heads)(cache, table)


def put_back(
    cache: Cache,
    table: Int[Array, "slots n"] | None,
    seen: Cache,
    positions: Int[Array, "steps slots"],
    written_slots: Bool[Array, "steps slots"],
    placement: Placement | None = None,
) -> Cache:
    """Returns `cache` with the positions that a call wrote into its window `seen`: `positions` for
    which `written_slots` is set.
    """
    if table is None:
        return jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, 0, x.ndim - 2), cache, seen
        )

    def local(cache, table, seen, positions, written_slots):
        pages, _, size, _ = jax.tree.leaves(cache)[0].shape[-4:]
        page = jnp.take_along_axis(table.T, positions // size, axis=0, mode="clip")
        page = jnp.where(written_slots, page, pages)  # out of range: dropped

        def scatter(x, new):
            # [slots kv steps d]
            rows = jnp.take_along_axis(new, positions.T[:, None, :, None], axis=2, mode="clip")
            return x.at[page, :, positions % size].set(rows.transpose(2, 0, 1, 3), mode="drop")

        return _each_layer(scatter, cache, seen)

    if placement is None:
        return local(cache, table, seen, positions, written_slots)
    rows, heads = pages_spec(placement, table.shape[0], cache)
    steps = P(None, *rows)
    return _by_group(placement, local, (heads, rows, heads, steps, steps), heads)(
        cache, table, seen, positions, written_slots
    )


def put_prefix(
    cache: Cache,
    table: Int[Array, "slots n"] | None,
    new: Cache,
    source: Int[Array, "m"],
    slots: Int[Array, "m"],
    placement: Placement | None = None,
) -> Cache:
    """Returns `cache` with row `source[i]` of a prefix, layers of `[p kv t d]`, at the start of
    `slots[i]`. Slots out of range are dropped.

    Slots that share a page of a prompt write the same values into it. Over a mesh without pages
    each slot looks up its row, because a scatter would send the rows of all slots to every device.
    """
    if table is None:
        write = _put_rows if placement is None else _look_up_rows
        return write(cache, new, source, slots)
    if placement is None:
        return _put_pages(cache, table, new, source, slots)
    rows, heads = pages_spec(placement, table.shape[0], cache)
    everywhere = jax.tree.map(lambda x: P(*(None,) * (x.ndim - 3), "tensor"), new)

    def put(cache, table, new, source, slots):
        n = table.shape[0]
        # Slots of other groups become n, outside the table: their writes are dropped.
        local = slots - jax.lax.axis_index(rows[0]) * n if rows[0] else slots
        local = jnp.where((local >= 0) & (local < n), local, n)
        return _put_pages(cache, table, new, source, local)

    return _by_group(placement, put, (heads, rows, everywhere, P(), P()), heads)(
        cache, table, new, source, slots
    )


def _put_rows(cache: Cache, new: Cache, source, slots) -> Cache:
    def rows(x, prefix):
        return x.at[slots, :, : prefix.shape[2]].set(
            jnp.take(prefix, source, axis=0).astype(x.dtype), mode="drop"
        )

    return _each_layer(rows, cache, new)


def _look_up_rows(cache: Cache, new: Cache, source, slots) -> Cache:
    count = jax.tree.leaves(cache)[0].shape[-4]
    row = jnp.full((count,), -1, jnp.int32).at[slots].set(source.astype(jnp.int32), mode="drop")

    def looked_up(x, prefix):
        t = prefix.shape[2]
        new = jnp.take(prefix, jnp.maximum(row, 0), axis=0).astype(x.dtype)
        return x.at[:, :, :t].set(jnp.where((row >= 0)[:, None, None, None], new, x[:, :, :t]))

    return _each_layer(looked_up, cache, new)


def _put_pages(cache: Cache, table: Int[Array, "slots n"], new: Cache, source, slots) -> Cache:
    def paged(x, prefix):
        p, kv, t, d = prefix.shape
        pages, _, size, _ = x.shape
        n = -(-t // size)
        parts = (
            jnp.pad(prefix, ((0, 0), (0, 0), (0, n * size - t), (0, 0)))
            .reshape(p, kv, n, size, d)
            .transpose(0, 2, 1, 3, 4)
        )
        to = jnp.take(table, slots, axis=0, mode="fill", fill_value=pages)[:, :n]
        return x.at[to].set(jnp.take(parts, source, axis=0).astype(x.dtype), mode="drop")

    return _each_layer(paged, cache, new)


def pages_spec(placement: Placement, slots: int, cache: Cache) -> tuple[P, Tree]:
    """Returns the specs of a table's rows and of each leaf of a paged cache: pages are split like
    their slots, heads over tensor.
    """
    axes = placement.batch_axes(slots) or None
    return P(axes), jax.tree.map(lambda x: P(*(None,) * (x.ndim - 4), axes, "tensor"), cache)


def _by_group(
    placement: Placement, function: Callable[..., Cache], in_specs: tuple[Tree, ...], out: Tree
) -> Callable[..., Cache]:
    return jax.shard_map(
        function, mesh=placement.mesh, in_specs=in_specs, out_specs=out, check_vma=False
    )
