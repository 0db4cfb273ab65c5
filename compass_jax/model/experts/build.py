"""The experts of a model's MoE layers on this chip or mesh: built once, called in every layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.base.aliases import Tree
from compass_jax.config import ComputeConfig, ModelConfig
from compass_jax.devices.sharding import Placement
from compass_jax.model.experts.cpu import grouped_swiglu
from compass_jax.model.experts.dispatch import Dispatch, counted_dispatch, sorted_dispatch
from compass_jax.model.experts.kernels import stacked_dot, tokamax_dot
from compass_jax.model.experts.parallel import Share
from compass_jax.model.experts.ragged import ragged_swiglu
from compass_jax.model.params import Layout, moe_specs
from compass_jax.model.quantize import Quantized
from compass_jax.model.stacks import InStack


class Grouped(NamedTuple):
    """A grouped matmul and its dispatch: how it finds each expert's rows."""

    dispatch: Callable[..., Dispatch]  # (expert of each pair, number of experts)
    swiglu: Callable[..., Float[Array, "n d"]]  # (x, gates, weights, dispatch)
    takes_stacks: bool = False  # whether weights may be InStack


class Experts(NamedTuple):
    """The experts of a model's MoE layers.

    Args:
        grouped: the grouped matmul of this chip.
        chunk: tokens of a device that go through the experts at a time (0: all), and again in the
            backward pass. It bounds the memory of dropless dispatch, which must hold all tokens of
            a chunk on one device in the worst case.
        specs: declarations of the layer's weights, with their layout on a mesh.
        placement: the mesh; None: one device.
        exchange: how tokens reach experts on other devices (ComputeConfig.exchange).
    """

    grouped: Grouped
    chunk: int = 0
    specs: dict[str, Tree] | None = None
    placement: Placement | None = None
    exchange: Literal["gather", "all_to_all"] = "gather"

    def work(self, shape: tuple[int, ...]) -> Callable[..., Float[Array, "n d"]]:
        """Returns `(x, ids, gates, mask, weights) -> output` for one device's tokens `[n d]`;
        `shape` is that of all devices' tokens.
        """
        local, placement = partial(moe_ffn, grouped=self.grouped), self.placement
        if placement is None:
            return local
        # Rows that the expert axis does not divide are replicated along it, so every device has all
        # tokens ("here").
        share: Any = Share(
            local,
            self.exchange if "expert" in placement.batch_axes(shape[0]) else "here",
            placement.size("expert"),
            placement.size("tensor"),
            placement.mesh.devices.flat[0].platform == "tpu",
        )
        return share


def build(
    config: ModelConfig,
    compute: ComputeConfig,
    placement: Placement | None = None,
    layout: Layout = "stacked",
) -> Experts | None:
    """Returns the experts of a model with parameters in `layout`; None for a dense model."""
    if config.moe is None:
        return None
    trains = placement is not None and placement.use == "train"
    return Experts(
        grouped_matmul(
            _matmul_for(compute),
            1 if placement is None else placement.size("expert"),
            config.moe.swiglu_limit,
            layout == "decode_stacked" and _has_stack_kernel(compute, placement),
        ),
        compute.moe_chunk,
        moe_specs(config, layout),
        placement,
        compute.exchange if trains else "gather",
    )


def grouped_matmul(name: str, parts: int = 1, limit: float = 0.0, stacks: bool = False) -> Grouped:
    """Returns the grouped matmul of CPU ("padded"), of TPU ("ragged") or of GPU ("tokamax").
    `parts` is the number of devices that share the experts, so that about 1 / parts of the pairs
    are local; it only changes the sizes of blocks and windows. `limit` is MoEConfig.swiglu_limit;
    with `stacks` "ragged" reads weights that are stacked over layers by tokamax's TPU kernel.
    ConfigError if the package of "tokamax" is not installed.
    """
    if name in ("ragged", "tokamax"):
        ragged = stacked_dot if stacks else jax.lax.ragged_dot
        dot = ragged if name == "ragged" else tokamax_dot()
        swiglu = partial(ragged_swiglu, parts=parts, limit=limit, dot=dot)
        return Grouped(counted_dispatch, swiglu, stacks)
    return Grouped(sorted_dispatch, partial(grouped_swiglu, parts=parts, limit=limit))


def _has_stack_kernel(compute: ComputeConfig, placement: Placement | None) -> bool:
    """Returns whether the experts run on a TPU, with tokamax's kernel installed."""
    devices = jax.devices() if placement is None else placement.mesh.devices.flat
    on_tpu = devices[0].platform == "tpu" and find_spec("tokamax") is not None
    return on_tpu and _matmul_for(compute) == "ragged"


def _matmul_for(compute: ComputeConfig) -> str:
    """Returns the configured grouped matmul; by default that of the chip."""
    if compute.experts != "auto":
        return compute.experts
    has_tokamax = find_spec("tokamax") is not None
    on_gpu = "tokamax" if has_tokamax else "ragged"
    return {"cpu": "padded", "gpu": on_gpu}.get(jax.default_backend(), "ragged")


def moe_ffn(
    x: Float[Array, "n d"],
    ids: Int[Array, "n k"],
    gates: Float[Array, "n k"],
    mask: Bool[Array, "n"],
    weights: dict[str, Float[Array, "e ..."] | Quantized | InStack],
    grouped: Grouped,
) -> Float[Array, "n d"]:
    """Computes sum_k gates_k * SwiGLU_{ids_k}(x), dropless. Masked tokens, and choices whose id is
    the number of experts, are not dispatched and give 0.
    """
    n, k = ids.shape
    experts = weights["down"].shape[0]
    # `experts` sorts after every group
    flat = jnp.where(mask[:, None], ids, experts).reshape(n * k)
    dispatch = grouped.dispatch(flat, experts)
    # A masked token's gates may be NaN, and 0 * NaN is not 0.
    gates = jnp.where(mask[:, None], gates.astype(x.dtype), jnp.zeros((), x.dtype))
    return grouped.swiglu(x, gates, weights, dispatch)
