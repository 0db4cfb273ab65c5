"""The decoder: one Flax module for training, prefill and decode, with explicit routes in and out.

    apply(params, tokens, positions, mask=..., routes=None, cache=None, segments=None)
        -> ModelOutput(hidden, routes, cache, aux)

Parameters in the stacked layout scan over layers (params.py); in the others the layers are unrolled
and a KV cache may be passed (prefill and decode). `routes` replays recorded expert choices (arXiv
2510.11370), unset rows route live, and the routes taken come back. `segments` numbers the sequences
that share a row: a token attends within its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from compass_jax.config import ComputeConfig, ModelConfig
from compass_jax.model.attention import InStack, LayerCache, attention, rms_norm, rope_tables
from compass_jax.model.experts.build import Experts, build
from compass_jax.model.moe import RouterStats, moe_layer, routing_dtype
from compass_jax.model.params import (
    Layout,
    decode_layout,
    init_tree,
    is_stacked,
    layer_runs,
    param_specs,
    unstack_run,
)
from compass_jax.model.quantize import any_quantized, matmul, quantized_zeros
from compass_jax.sharding import Placement, constrain

Cache = tuple[LayerCache, ...]


class ModelOutput(NamedTuple):
    """`hidden` is after the final norm. `routes` and `aux` are None for a dense model."""

    hidden: Float[Array, "b t d"]
    routes: UInt[Array, "b t l k"] | None
    cache: Cache | None
    aux: RouterStats | None  # each field with a leading axis of MoE layers


class Transformer(nn.Module):
    """Parameters are declared from `params.param_specs`, in `layout`."""

    config: ModelConfig
    compute: ComputeConfig = ComputeConfig()
    layout: Layout = "stacked"
    # how parameters and activations lie on a mesh; None: one device
    placement: Placement | None = None
    # ids that the tokenizer has; the LM head's other columns count for nothing (None: all are
    # tokens)
    known: int | None = None

    @property
    def columns(self) -> int:
        """Columns of the LM head that are tokens."""
        return (
            self.config.vocab_size
            if self.known is None
            else min(self.known, self.config.vocab_size)
        )

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        *,
        mask: Bool[Array, "b t"],
        routes: UInt[Array, "b t l k"] | None = None,
        cache: Cache | None = None,
        table: Int[Array, "b n"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> ModelOutput | None:
        """Runs the decoder on tokens at positions; masked tokens must follow the valid ones of
        their row, or segment. `table`: `cache` is of pages. `segments`: neighbours of a row with
        one number are a sequence; None: a row is one. None in `init`, which asks for parameters
        alone.
        """
        config, compute = self.config, self.compute
        specs, stacked = param_specs(config, self.layout), is_stacked(self.layout)
        params = {name: self._declared(name, spec) for name, spec in specs.items()}
        if self.is_initializing():  # a forward would compile each of its operations by itself
            return None
        _require_fitting(self, tokens, routes, cache, segments)
        x = jnp.take(params["embed"], tokens, axis=0).astype(compute.dtype_of("stream"))
        x = constrain(self.placement, x, "batch", "tokens", None)
        tables = rope_tables(
            positions, config.head_dim, config.rope_theta, compute.dtype_of("attention")
        )
        experts = build(config, compute, self.placement, self.layout)
        block = _Block(
            config, compute, tables, positions, mask, self.placement, table, experts, segments
        )
        by_layer = None if routes is None else jnp.moveaxis(routes, 2, 0)
        ids, stats, first = [], [], 0
        caches: list[LayerCache] = []
        for n, run in enumerate(layer_runs(config)):
            moe_here = run.repeats * sum(run.period)
            of_run = None if by_layer is None else by_layer[first : first + moe_here]
            first += moe_here
            here = params[f"run_{n}"]
            if cache is not None and stacked:
                x, out, new = _scan_cached(
                    block, run, here, x, of_run, cache[len(caches) : len(caches) + len(run.period)]
                )
                caches += new
            elif stacked and compute.scan_layers:
                x, out = _scan_run(block, run, here, x, of_run)
            else:
                layers = unstack_run(here) if stacked else here
                x, out, new = _unroll_run(block, run, layers, x, of_run, cache)
                caches += new
            ids.append(out[0])
            stats.append(out[1])
        hidden = rms_norm(x, params["final_norm"], config.norm_eps)
        if not config.moe_layers:
            return ModelOutput(hidden, None, tuple(caches) if cache is not None else None, None)
        taken = jnp.moveaxis(jnp.concatenate(ids), 0, 2)
        aux = jax.tree.map(lambda *xs: jnp.concatenate(xs), *[s for s in stats if s is not None])
        return ModelOutput(hidden, taken, tuple(caches) if cache is not None else None, aux)

    def _declared(self, name: str, spec: Any) -> Any:
        """The parameters of `spec`. 8-bit matrices are read as they are: flax compares what it is
        given with the initialiser's, leaf by leaf.
        """
        held: Any = self.get_variable("params", name) if self.has_variable("params", name) else None
        if any_quantized(held):
            return held
        return self.param(
            name, lambda key: init_tree(key, spec, self.config.init_std, self.compute.param_dtype)
        )


class _Block(NamedTuple):
    """What every layer of one forward pass shares."""

    config: ModelConfig
    compute: ComputeConfig
    tables: Any
    positions: Int[Array, "b t"]
    mask: Bool[Array, "b t"]
    placement: Placement | None
    table: Int[Array, "b n"] | None
    experts: Experts | None
    segments: Int[Array, "b t"] | None

    def layer(self, x, params, is_moe: bool, routes, cache):
        """One decoder layer -> (x, cache, ids or None, stats or None)."""
        config = self.config
        with jax.named_scope("attention"):
            y = self._normed(x, params["attention_norm"], "attention")
            y, cache = attention(
                y,
                params["attention"],
                self.tables,
                self.positions,
                config,
                cache,
                self.placement,
                attention_kernel(self.compute),
                self.table,
                self.segments,
            )
            x = constrain(self.placement, x + y.astype(x.dtype), "batch", "tokens", None)
        y = self._normed(x, params["mlp_norm"], "mlp")
        if not is_moe:
            with jax.named_scope("mlp"):
                gate, up, down = (params["mlp"][name] for name in ("gate", "up", "down"))
                out = matmul(jax.nn.silu(matmul(y, gate)) * matmul(y, up), down)
                return (
                    constrain(self.placement, x + out.astype(x.dtype), "batch", "tokens", None),
                    cache,
                    None,
                    None,
                )
        with jax.named_scope("moe"):
            assert self.experts is not None
            own = self.compute.dtype_of("gate") != self.compute.dtype_of("mlp")
            gate_input = self._normed(x, params["mlp_norm"], "gate") if own else y
            y, ids, stats = moe_layer(
                y, gate_input, params["mlp"], routes, self.mask, config.mixture, self.experts
            )
            return x + y.astype(x.dtype), cache, ids, stats

    def _normed(self, x, scale, part: str):
        """RMS norm in the dtype of `part`, or in that of the stream where that is wider."""
        dtype = jnp.dtype(self.compute.dtype_of(part))
        x = x.astype(dtype) if dtype.itemsize > x.dtype.itemsize else x
        return rms_norm(x, scale, self.config.norm_eps).astype(dtype)


def _require_fitting(
    model: Transformer,
    tokens: Int[Array, "b t"],
    routes: UInt[Array, "b t l k"] | None,
    cache: Cache | None,
    segments: Int[Array, "b t"] | None,
) -> None:
    """Raises ValueError for a cache, routes or segments that this model does not take as it is laid
    out.
    """
    if cache is not None and model.layout == "stacked":
        raise ValueError(
            "a KV cache needs the decode layout of the parameters (params.to_decode): a scan"
            " would copy both at every token"
        )
    if routes is not None:
        _require_own_routes(model.config, tokens, routes)
    split = model.placement is not None and model.placement.token_axis(tokens.shape[1]) is not None
    if segments is not None and (split or cache is not None):
        raise ValueError(
            "segments need rows that lie whole on a device, on a mesh without context, and no KV"
            " cache"
        )


def _require_own_routes(
    config: ModelConfig, tokens: Int[Array, "b t"], routes: UInt[Array, "b t l k"]
) -> None:
    """Raises ValueError for routes of another model: a layer too many would go unread, one too few
    would be read twice, without a word.
    """
    if not config.moe_layers:
        raise ValueError("the model has no MoE layers: routes must be None")
    shape, dtype = (
        (*tokens.shape, len(config.moe_layers), config.mixture.top_k),
        routing_dtype(config.mixture.experts),
    )
    if routes.shape != shape or routes.dtype != dtype:
        raise ValueError(
            f"routes are {routes.dtype}{list(routes.shape)}, tokens {list(tokens.shape)} of this"
            f" model take {dtype}{list(shape)}"
        )


def attention_kernel(compute: ComputeConfig) -> str:
    """'splash' on a TPU, 'portable' elsewhere, unless the config names one."""
    if compute.attention != "auto":
        return compute.attention
    return "splash" if jax.default_backend() == "tpu" else "portable"


def _period(block: _Block, kinds, params, x, routes, caches):
    """The layers of one period; `routes` is `[moe layers of the period, b t k]`."""
    ids, stats, new, at = [], [], [], 0
    for j, is_moe in enumerate(kinds):
        own = routes[at] if is_moe and routes is not None else None
        x, cache, taken, stat = block.layer(
            x, params[f"layer_{j}"], is_moe, own, None if caches is None else caches[j]
        )
        at += is_moe
        new.append(cache)
        if is_moe:
            ids.append(taken)
            stats.append(stat)
    out = (jnp.stack(ids), jax.tree.map(lambda *s: jnp.stack(s), *stats)) if ids else (None, None)
    return x, out, new


def _flatten_layers(tree):
    return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), tree)


def _scan_run(block: _Block, run, params, x, routes):
    def body(carry, scanned):
        layer_params, own = scanned
        y, out, _ = _period(block, run.period, layer_params, carry, own, None)
        return y, out

    if block.compute.remat:
        body = jax.checkpoint(body, prevent_cse=False)
    per_period = sum(run.period)
    if routes is not None and per_period:
        routes = routes.reshape(run.repeats, per_period, *routes.shape[1:])
    x, out = jax.lax.scan(body, x, (params, routes if per_period else None))
    return x, _drop_empty(_flatten_layers(out), block)


def _scan_cached(block: _Block, run, params, x, routes, caches: Cache):
    """One run with stacked caches: these are carried, and each layer writes and reads its own part,
    so that they are never copied.
    """
    per_period = sum(run.period)
    if routes is not None and per_period:
        routes = routes.reshape(run.repeats, per_period, *routes.shape[1:])

    def body(carry, scanned):
        x, caches = carry
        layer, layer_params, own = scanned
        x, out, new = _period(
            block, run.period, layer_params, x, own, [InStack(cache, layer) for cache in caches]
        )
        return (x, tuple(part.cache for part in new)), out

    layers = jnp.arange(run.repeats, dtype=jnp.int32)
    (x, caches), out = jax.lax.scan(
        body, (x, tuple(caches)), (layers, params, routes if per_period else None)
    )
    return x, _drop_empty(_flatten_layers(out), block), list(caches)


def _unroll_run(block: _Block, run, params, x, routes, cache):
    outs, new, size, per_period = [], [], len(run.period), sum(run.period)

    def period(params, x, own, part):
        return _period(block, run.period, params, x, own, part)

    if block.compute.remat and cache is None:
        period = jax.checkpoint(period)
    for r in range(run.repeats):
        own = None if routes is None else routes[r * per_period : (r + 1) * per_period]
        at = run.layer(r, 0)
        part = None if cache is None else cache[at : at + size]
        x, out, caches = period(params[r], x, own, part)
        outs.append(out)
        new += caches
    return x, _drop_empty(jax.tree.map(lambda *ys: jnp.concatenate(ys), *outs), block), new


def _drop_empty(out, block: _Block):
    """A run without MoE layers contributes routes of zero layers, so that runs can be
    concatenated.
    """
    ids, stats = out
    if ids is None and block.config.moe is not None:
        ids = jnp.zeros(
            (0, *block.mask.shape, block.config.moe.top_k), routing_dtype(block.config.moe.experts)
        )
    return ids, stats


def init_params(config: ModelConfig, compute: ComputeConfig, key: jax.Array) -> Any:
    """Random parameters in the stacked layout."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return Transformer(config, compute).init(key, tokens, tokens, mask=jnp.ones((1, 1), bool))[
        "params"
    ]


def apply(
    model: Transformer,
    params,
    tokens,
    positions,
    *,
    mask,
    routes=None,
    cache=None,
    table=None,
    segments=None,
) -> ModelOutput:
    """`model.apply` on the bare parameter tree."""
    out: Any = model.apply(
        {"params": params},
        tokens,
        positions,
        mask=mask,
        routes=routes,
        cache=cache,
        table=table,
        segments=segments,
    )
    return out


def init_cache(
    config: ModelConfig, batch: int, length: int, compute: ComputeConfig, kind: str = "off"
) -> Cache:
    """An empty KV cache of `length` positions per sequence, in the dtype of attention or in the 8
    bits of `kind` ("e4m3", "int8").

    One of each layer; with compute.scan_decode one of each layer of a run's period, its repeats in
    front.
    """

    def empty(*first: int):
        shape = (*first, batch, config.kv_heads, length, config.head_dim)
        return (
            jnp.zeros(shape, compute.dtype_of("attention"))
            if kind == "off"
            else quantized_zeros(shape, kind)
        )

    if is_stacked(decode_layout(compute)):
        return tuple(
            LayerCache(empty(run.repeats), empty(run.repeats))
            for run in layer_runs(config)
            for _ in run.period
        )
    return tuple(LayerCache(empty(), empty()) for _ in range(config.layers))
