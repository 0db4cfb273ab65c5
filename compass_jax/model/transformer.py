"""The decoder: one Flax module for training, prefill and decode, with explicit routes in and out.

    apply(params, tokens, positions, mask=..., routes=None, cache=None, segments=None)
        -> ModelOutput(hidden, routes, cache, aux)

Parameters in the stacked layout scan over layers (params.py); other layouts unroll them and accept
a KV cache (prefill and decode). `routes` replays recorded expert choices (arXiv 2510.11370): unset
rows route live, and the output has the routes used. `segments` numbers the sequences that share a
row: a token attends within its own segment.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from compass_jax.base.aliases import Tree
from compass_jax.config import ComputeConfig, ModelConfig
from compass_jax.devices.sharding import Placement, constrain
from compass_jax.model.attention import LayerCache, rms_norm
from compass_jax.model.layer import Block, Settings, Shared
from compass_jax.model.lora import any_low_rank
from compass_jax.model.moe import RouterStats, routing_dtype
from compass_jax.model.params import (
    Layout,
    decode_layout,
    init_tree,
    is_spec,
    is_stacked,
    layer_runs,
    param_specs,
    unstack_run,
)
from compass_jax.model.quantize import any_quantized, quantized_zeros
from compass_jax.model.rope import rope_tables
from compass_jax.model.runs import Cache, scan_cached, scan_run, unroll_run


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
        settings = Settings(config, compute, self.layout, self.placement)
        block = Block(settings, Shared(tables, positions, mask, table, segments))
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
                x, out, new = scan_cached(
                    block,
                    run,
                    run_params,
                    x,
                    run_routes,
                    cache[len(caches) : len(caches) + len(run.period)],
                )
                caches += new
            elif stacked and compute.scan_layers:
                x, out = scan_run(block, run, run_params, x, run_routes)
            else:
                layers = unstack_run(run_params) if stacked else run_params
                x, out, new = unroll_run(block, run, layers, x, run_routes, cache)
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
