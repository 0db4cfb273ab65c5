"""The decoder: one Flax module for training, prefill and decode, with explicit routes in and out.

    apply(params, tokens, positions, mask=..., routes=None, cache=None, segments=None)
        -> ModelOutput(hidden, routes, cache, aux)

Parameters in the stacked layout scan over layers (params.py); other layouts unroll them and accept
a KV cache (prefill and decode). `routes` replays recorded expert choices (arXiv 2510.11370): unset
rows route live, and the output has the routes used. `segments` numbers the sequences that share a
row: a token attends within its own segment.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from compass_jax.aliases import Tree
from compass_jax.config import ComputeConfig, ModelConfig
from compass_jax.model.attention import LayerCache, attention, rms_norm
from compass_jax.model.experts.build import build
from compass_jax.model.kernels import SAVED
from compass_jax.model.lora import any_low_rank, merged
from compass_jax.model.moe import RouterStats, moe_layer, routing_dtype
from compass_jax.model.params import (
    Layout,
    Run,
    decode_layout,
    init_tree,
    is_spec,
    is_stacked,
    layer_runs,
    param_specs,
    unstack_run,
)
from compass_jax.model.quantize import any_quantized, is_quantized, matmul, quantized_zeros
from compass_jax.model.rope import rope_tables
from compass_jax.model.stacks import InStack
from compass_jax.sharding import Placement, constrain

Cache = tuple[LayerCache, ...]


class ModelOutput(NamedTuple):
    """The decoder's output. `hidden` is after the final norm; `routes` and `aux` are None for a
    dense model.
    """

    hidden: Float[Array, "b t d"]
    routes: UInt[Array, "b t l k"] | None
    cache: Cache | None
    aux: RouterStats | None  # each field with a leading axis of MoE layers


class Transformer(nn.Module):
    """The decoder, with parameters declared by `params.param_specs` in `layout`."""

    config: ModelConfig
    compute: ComputeConfig = ComputeConfig()
    layout: Layout = "stacked"
    # layout of parameters and activations on a mesh; None: one device
    placement: Placement | None = None
    # size of the tokenizer; the LM head's columns beyond it are ignored (None: all are tokens)
    known: int | None = None

    @property
    def columns(self) -> int:
        """The number of LM-head columns that are tokens."""
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
        """Runs the decoder on tokens at positions. Masked tokens must follow the valid ones of
        their row or segment.

        Args:
            table: block table; `cache` then consists of pages.
            segments: number of the sequence that each token of a row belongs to; None: one sequence
                a row.

        Returns:
            The output; None in `init`, which only declares parameters.
        """
        config, compute = self.config, self.compute
        specs, stacked = param_specs(config, self.layout), is_stacked(self.layout)
        params = {name: self._declared(name, spec) for name, spec in specs.items()}
        if self.is_initializing():  # a forward would compile each operation separately
            return None
        _require_fitting(self, tokens, routes, cache, segments)
        # A cast before the gather would convert the whole table.
        x = jnp.take(params["embed"], tokens, axis=0).astype(compute.dtype_of("stream"))
        x = constrain(self.placement, x, "batch", "tokens", None)
        tables = rope_tables(
            positions,
            config.rotary_dim,
            config.rope_theta,
            compute.dtype_of("attention"),
            config.rope_scaling,
        )
        settings = _Settings(config, compute, self.layout, self.placement)
        block = _Block(settings, _Shared(tables, positions, mask, table, segments))
        # [l b t k], so that each run takes its MoE layers along the first axis.
        by_layer = None if routes is None else jnp.moveaxis(routes, 2, 0)
        ids, stats, first = [], [], 0
        caches: list[LayerCache] = []
        for n, run in enumerate(layer_runs(config)):
            run_moe_layers = run.repeats * sum(run.period)
            run_routes = None if by_layer is None else by_layer[first : first + run_moe_layers]
            first += run_moe_layers
            run_params = params[f"run_{n}"]
            if cache is not None and stacked:
                x, out, new = _scan_cached(
                    block,
                    run,
                    run_params,
                    x,
                    run_routes,
                    cache[len(caches) : len(caches) + len(run.period)],
                )
                caches += new
            elif stacked and compute.scan_layers:
                x, out = _scan_run(block, run, run_params, x, run_routes)
            else:
                layers = unstack_run(run_params) if stacked else run_params
                x, out, new = _unroll_run(block, run, layers, x, run_routes, cache)
                caches += new
            ids.append(out[0])
            stats.append(out[1])
        hidden = rms_norm(x, params["final_norm"], config.norm_eps)
        if not config.moe_layers:
            return ModelOutput(hidden, None, tuple(caches) if cache is not None else None, None)
        used_routes = jnp.moveaxis(jnp.concatenate(ids), 0, 2)
        aux = jax.tree.map(lambda *xs: jnp.concatenate(xs), *[s for s in stats if s is not None])
        return ModelOutput(hidden, used_routes, tuple(caches) if cache is not None else None, aux)

    def _declared(self, name: str, spec: Tree) -> Tree:
        """Returns the parameters of `spec`, initialised if they do not exist.

        flax would trace the initialiser in every trace of the model to compare the shapes.
        """
        if not self.has_variable("params", name):
            config, dtype = self.config, self.compute.param_dtype
            return self.param(name, lambda key: init_tree(key, spec, config.init_std, dtype))
        value: Tree = self.get_variable("params", name)
        _require_shapes(name, value, spec)
        return value


def _require_shapes(name: str, params: Tree, spec: Tree) -> None:
    """Raises ValueError for parameters whose shapes are not those of `spec`. 8-bit matrices and
    those with adapters are not compared.
    """
    if any_quantized(params) or any_low_rank(params):
        return
    specs = jax.tree_util.tree_leaves_with_path(spec, is_leaf=is_spec)
    for (path, leaf_spec), leaf in zip(specs, jax.tree.leaves(params), strict=True):
        if leaf.shape != tuple(leaf_spec.shape):
            where = f"{name}{jax.tree_util.keystr(path)}"
            raise ValueError(f"{where} has shape {leaf.shape}, the model has {leaf_spec.shape}")


class _Settings(NamedTuple):
    """The settings of a forward pass, static in its compiled programs."""

    config: ModelConfig
    compute: ComputeConfig
    layout: Layout
    placement: Placement | None


class _Shared(NamedTuple):
    """The arrays that all layers of a forward pass take."""

    tables: Tree
    positions: Int[Array, "b t"]
    mask: Bool[Array, "b t"]
    table: Int[Array, "b n"] | None
    segments: Int[Array, "b t"] | None


class _Block(NamedTuple):
    """The arguments shared by all layers of a forward pass."""

    settings: _Settings
    shared: _Shared


# Compiled within the program that calls it; equal layers are then traced and lowered once.
@partial(jax.jit, static_argnames=("settings", "is_moe", "window"))
def _layer(settings: _Settings, shared: _Shared, x, params, is_moe: bool, routes, cache, window):
    """Runs one decoder layer; returns (x, cache, ids or None, stats or None)."""
    config, compute, layout, placement = settings
    tables, positions, mask, table, segments = shared
    with jax.named_scope("attention"):
        y = _normed(settings, x, params["attention_norm"], "attention")
        y, cache = attention(
            y,
            params["attention"],
            tables,
            positions,
            config,
            cache,
            placement,
            attention_kernel(compute),
            table,
            segments,
            window,
        )
        # The residual stream keeps its dtype, whatever attention and the MLP compute in.
        x = constrain(placement, x + y.astype(x.dtype), "batch", "tokens", None)
    y = _normed(settings, x, params["mlp_norm"], "mlp")
    if not is_moe:
        with jax.named_scope("mlp"):
            out = _swiglu(y, params["mlp"])
            x = constrain(placement, x + out.astype(x.dtype), "batch", "tokens", None)
            return x, cache, None, None
    with jax.named_scope("moe"):
        experts = build(config, compute, placement, layout)
        assert experts is not None
        # The router's input is normalised again in the gate's dtype: a cast of `y` would have been
        # rounded to the MLP's dtype before.
        separate_gate = compute.dtype_of("gate") != compute.dtype_of("mlp")
        gate_input = _normed(settings, x, params["mlp_norm"], "gate") if separate_gate else y
        # a grouped product takes one matrix an expert: adapters are merged before it
        weights = merged(params["mlp"])
        out, ids, stats = moe_layer(y, gate_input, weights, routes, mask, config.mixture, experts)
        if "shared" in params:
            out = out + _shared_expert(y, params["shared"])
        return x + out.astype(x.dtype), cache, ids, stats


def _normed(settings: _Settings, x, scale, part: str):
    """Computes the RMS norm in the dtype of `part`, or of the stream where that is wider."""
    dtype = jnp.dtype(settings.compute.dtype_of(part))
    x = x.astype(dtype) if dtype.itemsize > x.dtype.itemsize else x
    return rms_norm(x, scale, settings.config.norm_eps).astype(dtype)


def _swiglu(y, params):
    gate, up, down = (params[name] for name in ("gate", "up", "down"))
    return matmul(jax.nn.silu(matmul(y, gate)) * matmul(y, up), down)


def _shared_expert(y, params):
    """Computes the expert that every token takes, times the token's sigmoid gate where the model
    has one.
    """
    out = _swiglu(y, params)
    return out * jax.nn.sigmoid(matmul(y, params["sigmoid"])) if "sigmoid" in params else out


def _require_fitting(
    model: Transformer,
    tokens: Int[Array, "b t"],
    routes: UInt[Array, "b t l k"] | None,
    cache: Cache | None,
    segments: Int[Array, "b t"] | None,
) -> None:
    """Raises ValueError for a cache, routes or segments that do not fit the model's layout."""
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
            "segments need whole rows on a device (a mesh without context) and no KV cache"
        )


def _require_own_routes(
    config: ModelConfig, tokens: Int[Array, "b t"], routes: UInt[Array, "b t l k"]
) -> None:
    """Raises ValueError for routes of another model: an extra layer would be ignored and a missing
    one read twice, silently.
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
    """Returns the attention kernel: the configured one, else 'splash' on a TPU, 'cudnn' on a GPU
    of NVIDIA and 'portable' elsewhere.
    """
    if compute.attention != "auto":
        return compute.attention
    if jax.default_backend() == "tpu":
        return "splash"
    is_nvidia = "nvidia" in jax.devices()[0].device_kind.lower()
    return "cudnn" if is_nvidia else "portable"


def _period(block: _Block, run: Run, params, x, routes, caches):
    """Runs the layers of one period; `routes` is `[moe layers of the period, b t k]`."""
    ids, stats, new, at = [], [], [], 0
    for j, is_moe in enumerate(run.period):
        layer_routes = routes[at] if is_moe and routes is not None else None
        x, cache, used, stat = _layer(
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


def _scan_run(block: _Block, run, params, x, routes):
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


def _scan_cached(block: _Block, run, params, x, routes, caches: Cache):
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


def _in_stack(block: _Block, params: Tree) -> Tree:
    """Returns which weights a kernel reads in their stack: matrices of experts, [layers e i o]."""
    config, compute, layout, placement = block.settings
    experts = build(config, compute, placement, layout)
    takes, dtype = experts is not None and experts.grouped.takes_stacks, compute.dtype_of("mlp")

    def reads(w):
        # A matrix in a stack is not cast (`in_dtype`), so it must have the products' dtype already.
        return takes and len(w.shape) == 4 and (is_quantized(w) or w.dtype == dtype)

    return jax.tree.map(reads, params, is_leaf=is_quantized)


def _unroll_run(block: _Block, run, params, x, routes, cache):
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


def _policy(block: _Block):
    """Returns the policy of rematerialisation, which keeps the output of `splash_causal` unless
    compute.remat_attention is set: with long rows attention takes most of a layer's time, and its
    output little memory.
    """
    names = () if block.settings.compute.remat_attention else (SAVED,)
    return jax.checkpoint_policies.save_only_these_names(*names)


def _drop_empty(out, block: _Block):
    """Gives a run without MoE layers routes of zero layers, so that runs can be concatenated."""
    ids, stats = out
    moe = block.settings.config.moe
    if ids is None and moe is not None:
        ids = jnp.zeros((0, *block.shared.mask.shape, moe.top_k), routing_dtype(moe.experts))
    return ids, stats


def init_params(config: ModelConfig, compute: ComputeConfig, key: jax.Array) -> Tree:
    """Returns random parameters in the stacked layout."""
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
    """Calls `model.apply` on the bare parameter tree."""
    out: Tree = model.apply(
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
    """Returns an empty KV cache of `length` positions per sequence, in the dtype of attention or in
    8 bits of `kind` ("e4m3", "int8").

    It has one LayerCache per layer; with compute.scan_decode one per layer of a run's period, with
    a leading axis of the run's repeats.
    """

    def empty(width: int, first: tuple[int, ...]):
        shape = (*first, batch, config.kv_heads, length, width)
        return (
            jnp.zeros(shape, compute.dtype_of("attention"))
            if kind == "off"
            else quantized_zeros(shape, kind)
        )

    def layer(*first: int) -> LayerCache:
        return LayerCache(empty(config.head_dim, first), empty(config.value_dim, first))

    if is_stacked(decode_layout(compute)):
        return tuple(layer(run.repeats) for run in layer_runs(config) for _ in run.period)
    return tuple(layer() for _ in range(config.layers))
