"""Runs of equal layers: scanned over their stacked parameters, or unrolled."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from compass_jax.base.aliases import Tree
from compass_jax.model.attention import LayerCache
from compass_jax.model.experts.build import build
from compass_jax.model.kernels import SAVED
from compass_jax.model.layer import Block, layer
from compass_jax.model.moe import routing_dtype
from compass_jax.model.params import Run
from compass_jax.model.quantize import is_quantized
from compass_jax.model.stacks import InStack

Cache = tuple[LayerCache, ...]


def _period(block: Block, run: Run, params, x, routes, caches):
    """Runs the layers of one period; `routes` is `[moe layers of the period, b t k]`."""
    ids, stats, new, at = [], [], [], 0
    for j, is_moe in enumerate(run.period):
        layer_routes = routes[at] if is_moe and routes is not None else None
        x, cache, used, stat = layer(
            *block,
            x,
            params[f"layer_{j}"],
            is_moe,
            layer_routes,
            None if caches is None else caches[j],
            # Equal in all copies of the period (`layer_runs`), so a scan can trace one.
            block.settings.config.window_of(run.layer(0, j)),
        )
        at += is_moe
        new.append(cache)
        if is_moe:
            ids.append(used)
            stats.append(stat)
    out = (jnp.stack(ids), jax.tree.map(lambda *s: jnp.stack(s), *stats)) if ids else (None, None)
    return x, out, new


def _flatten_layers(tree):
    return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), tree)


def scan_run(block: Block, run, params, x, routes):
    """Runs layers in a scan over their stacked parameters; returns (x, (ids, stats))."""

    def body(carry, scanned):
        layer_params, period_routes = scanned
        y, out, _ = _period(block, run, layer_params, carry, period_routes, None)
        return y, out

    if block.settings.compute.remat:
        # A scan's loop already keeps XLA from merging the recomputation with the forward pass.
        body = jax.checkpoint(body, prevent_cse=False, policy=_policy(block))
    per_period = sum(run.period)
    if routes is not None and per_period:
        routes = routes.reshape(run.repeats, per_period, *routes.shape[1:])
    x, out = jax.lax.scan(body, x, (params, routes if per_period else None))
    return x, _drop_empty(_flatten_layers(out), block)


def scan_cached(block: Block, run, params, x, routes, caches: Cache):
    """Runs layers with stacked caches as the scan's carry. Each layer reads and writes its part in
    place, so that XLA copies no cache; and no experts, where a kernel reads them in their stack.
    """
    per_period = sum(run.period)
    if routes is not None and per_period:
        routes = routes.reshape(run.repeats, per_period, *routes.shape[1:])
    in_stack = _in_stack(block, params)

    def body(carry, scanned):
        x, caches = carry
        layer, layer_params, period_routes = scanned
        # Where `stays` is true the scanned part is None: a scan would copy each layer's part.
        layer_params = jax.tree.map(
            lambda stays, part, stack: InStack(stack, layer) if stays else part,
            in_stack,
            layer_params,
            params,
        )
        x, out, new = _period(
            block,
            run,
            layer_params,
            x,
            period_routes,
            [InStack(cache, layer) for cache in caches],
        )
        return (x, tuple(part.stack for part in new)), out

    layers = jnp.arange(run.repeats, dtype=jnp.int32)
    split = jax.tree.map(lambda stays, x: None if stays else x, in_stack, params)
    (x, caches), out = jax.lax.scan(
        body, (x, tuple(caches)), (layers, split, routes if per_period else None)
    )
    return x, _drop_empty(_flatten_layers(out), block), list(caches)


def _in_stack(block: Block, params: Tree) -> Tree:
    """Returns which weights a kernel reads in their stack: matrices of experts, [layers e i o]."""
    config, compute, layout, placement = block.settings
    experts = build(config, compute, placement, layout)
    takes, dtype = experts is not None and experts.grouped.takes_stacks, compute.dtype_of("mlp")

    def reads(w):
        # A matrix in a stack is not cast (`in_dtype`), so it must have the products' dtype already.
        return takes and len(w.shape) == 4 and (is_quantized(w) or w.dtype == dtype)

    return jax.tree.map(reads, params, is_leaf=is_quantized)


def unroll_run(block: Block, run, params, x, routes, cache):
    """Runs layers one after the other; returns (x, (ids, stats), the layers' caches)."""
    outs, new, size, per_period = [], [], len(run.period), sum(run.period)

    def period(params, x, period_routes, part):
        return _period(block, run, params, x, period_routes, part)

    if block.settings.compute.remat and cache is None:
        period = jax.checkpoint(period, policy=_policy(block))
    for r in range(run.repeats):
        period_routes = None if routes is None else routes[r * per_period : (r + 1) * per_period]
        at = run.layer(r, 0)
        part = None if cache is None else cache[at : at + size]
        x, out, caches = period(params[r], x, period_routes, part)
        outs.append(out)
        new += caches
    return x, _drop_empty(jax.tree.map(lambda *ys: jnp.concatenate(ys), *outs), block), new


def _policy(block: Block):
    """Returns the policy of rematerialisation, which keeps the output of `splash_causal` unless
    compute.remat_attention is set: with long rows attention takes most of a layer's time, and its
    output little memory.
    """
    names = () if block.settings.compute.remat_attention else (SAVED,)
    return jax.checkpoint_policies.save_only_these_names(*names)


def _drop_empty(out, block: Block):
    """Gives a run without MoE layers routes of zero layers, so that runs can be concatenated."""
    ids, stats = out
    moe = block.settings.config.moe
    if ids is None and moe is not None:
        ids = jnp.zeros((0, *block.shared.mask.shape, moe.top_k), routing_dtype(moe.experts))
    return ids, stats
