"""One decoder layer: attention, then an MLP or a mixture of experts."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from compass_jax.base.aliases import Tree
from compass_jax.config import ComputeConfig, ModelConfig
from compass_jax.devices.sharding import Placement, constrain
from compass_jax.model.attention import attention, rms_norm
from compass_jax.model.experts.build import build
from compass_jax.model.lora import merged
from compass_jax.model.moe import moe_layer
from compass_jax.model.params import Layout
from compass_jax.model.quantize import matmul


class Settings(NamedTuple):
    """The settings of a forward pass, static in its compiled programs."""

    config: ModelConfig
    compute: ComputeConfig
    layout: Layout
    placement: Placement | None


class Shared(NamedTuple):
    """The arrays that all layers of a forward pass take."""

    tables: Tree
    positions: Int[Array, "b t"]
    mask: Bool[Array, "b t"]
    table: Int[Array, "b n"] | None
    segments: Int[Array, "b t"] | None


class Block(NamedTuple):
    """The arguments shared by all layers of a forward pass."""

    settings: Settings
    shared: Shared


# Compiled within the program that calls it; equal layers are then traced and lowered once.
@partial(jax.jit, static_argnames=("settings", "is_moe", "window"))
def layer(settings: Settings, shared: Shared, x, params, is_moe: bool, routes, cache, window):
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
            mask,
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


def _normed(settings: Settings, x, scale, part: str):
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
