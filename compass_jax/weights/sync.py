"""Weight sync: training parameters to rollout parameters in one jitted function.

8-bit weights are emulated on CPU only. Weights pass through the host only if the rollout has
separate devices whose sharding the training's devices cannot produce (`nearby_placement`).
"""

from __future__ import annotations

import math
import time
from functools import cache, partial

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.base.programs import Program
from compass_jax.config import MeshConfig, ModelConfig
from compass_jax.devices.sharding import BATCH, STORE, Placement, make_mesh, ordered
from compass_jax.model.lora import merged
from compass_jax.model.params import (
    Layout,
    abstract_params,
    decode_shardings,
    is_spec,
    param_specs,
    to_decode,
)
from compass_jax.model.quantize import eight_bit, emulate, kind_for


def _convert(
    params: Tree,
    model: ModelConfig,
    dtype: str,
    quantize: str,
    stored: bool,
    tensor: int,
    layout: Layout,
) -> Tree:
    # merged in float32: adapters change less than bfloat16 resolves
    decode, specs = to_decode(merged(params), tensor, layout), param_specs(model, layout)
    return (eight_bit if stored else emulate)(decode, specs, quantize, dtype)


_STATIC = ("model", "dtype", "quantize", "stored", "tensor", "layout")
_convert_jitted = partial(jax.jit, static_argnames=_STATIC)(_convert)


# Cached, because a new jitted function for every sync would be compiled again.
@cache
def converter(
    model: ModelConfig,
    placement: Placement,
    dtype: str,
    quantize: str,
    stored: bool,
    tensor: int,
    layout: Layout,
    source: Mesh | None,
):
    """Returns the jitted function of `sync_weights` with results sharded for the decoding mesh
    `placement`. `source` is the training's mesh.
    """
    options: JsonObject = {
        "model": model,
        "dtype": dtype,
        "quantize": quantize,
        "stored": stored,
        "tensor": tensor,
        "layout": layout,
    }
    abstract = jax.eval_shape(partial(_convert, **options), abstract_params(model, "float32"))

    def convert(params):
        if source is not None:
            tables = {
                name: _by_vocabulary(params[name], spec.axes.index("vocab"), source, placement)
                for name, spec in param_specs(model).items()
                if is_spec(spec) and "vocab" in spec.axes
            }
            params = {**params, **tables}
        return _convert(params, **options)

    return jax.jit(convert, out_shardings=decode_shardings(abstract, model, placement, layout))


def _by_vocabulary(x: jax.Array, axis: int, source: Mesh, placement: Placement) -> jax.Array:
    """Reshards an embedding between meshes in two steps.

    It is first split along the vocabulary (`axis`) into as many parts as along the hidden axis, and
    then moved to the decoding mesh with the same parts. Without these steps the compiler gathers
    the full table on every device before it splits it.

    Returns the embedding unchanged if the decoding mesh has no axes with that many parts.
    """
    source_axes = [name for name in ("tensor", *STORE["embed"]) if source.shape[name] > 1]
    parts, target_axes = math.prod(source.shape[name] for name in source_axes), ["tensor"]
    for name in BATCH["decode"]:
        if placement.size(*target_axes, name) <= parts:
            target_axes.append(name)
    if placement.size(*target_axes) != parts or x.shape[axis] % parts:
        return x
    for mesh, names in ((source, source_axes), (placement.mesh, target_axes)):
        spec = PartitionSpec(*(None,) * axis, tuple(names), *(None,) * (x.ndim - 1 - axis))
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return x


def nearby_placement(params: Tree, expert: int, tensor: int) -> Placement:
    """Returns a mesh over the devices of `params` that shards matrices as a decoding mesh with
    these axes does, so that the result can be copied from device to device.

    If there are too few devices or their number does not divide, the mesh does not shard, and
    copies go through the host.
    """
    devices = list(ordered(jax.tree.leaves(params)[0].sharding))
    axes = {"expert": expert, "tensor": tensor}
    if len(devices) % math.prod(axes.values()):
        axes = {"expert": 1, "tensor": 1}
    return Placement(
        make_mesh(MeshConfig(replica=len(devices) // math.prod(axes.values()), **axes), devices),
        "decode",
    )


def resolve(quantize: str) -> str:
    """Returns rollout.quantize, with "auto" resolved to the type that the first device multiplies
    fast.
    """
    return kind_for(jax.devices()[0].device_kind) if quantize == "auto" else quantize


def sync_program(
    params: Tree,
    model: ModelConfig,
    dtype: str,
    quantize: str,
    stored: bool,
    *,
    placement: Placement | None,
    layout: Layout,
) -> Program:
    """Returns the program of `sync_weights`, for parameters or structs of them. If the rollout has
    separate devices, the result must still be copied to them.
    """
    if placement is None:
        keywords = {"model": model, "dtype": dtype, "quantize": quantize, "stored": stored}
        keywords |= {"tensor": 1, "layout": layout}
        return Program("hand-over", _convert_jitted, (params,), keywords)
    target, source = placement, None
    if _is_disaggregated(params, placement):
        target = nearby_placement(params, placement.size("expert"), placement.size("tensor"))
    else:
        # The sharding of parameters on one device has no mesh.
        source = getattr(jax.tree.leaves(params)[0].sharding, "mesh", None)
    options = (dtype, quantize, stored, placement.size("tensor"), layout)
    return Program("hand-over", converter(model, target, *options, source), (params,))


def sync_to_samplers(
    params: Tree,
    model: ModelConfig,
    dtype: str,
    quantize: str,
    stored: bool,
    *,
    mesh: MeshConfig,
    layout: Layout,
) -> tuple[Tree, dict[str, float]]:
    """Returns decoding weights on the training's devices for samplers in other processes, split
    like those of a decoding mesh `mesh` where the number of devices allows, and the metrics and
    other arguments of `sync_weights`.
    """
    started = time.perf_counter()
    program = samplers_program(
        params, model, dtype, resolve(quantize), stored, mesh=mesh, layout=layout
    )
    decode = jax.block_until_ready(program.function(*program.arguments))
    return decode, _sync_metrics(decode, started)


def samplers_program(
    params: Tree,
    model: ModelConfig,
    dtype: str,
    quantize: str,
    stored: bool,
    *,
    mesh: MeshConfig,
    layout: Layout,
) -> Program:
    """Returns the program of `sync_to_samplers`, for parameters or structs of them."""
    target = nearby_placement(params, mesh.expert, mesh.tensor)
    options = dtype, quantize, stored, mesh.tensor, layout
    return Program("hand-over", converter(model, target, *options, None), (params,))


def sampler_weights(
    model: ModelConfig,
    dtype: str,
    quantize: str,
    stored: bool,
    placement: Placement | None,
    layout: Layout,
) -> Tree:
    """Returns structs of the weights that a sampler on `placement` gets from `sync_to_samplers`."""
    tensor = 1 if placement is None else placement.size("tensor")

    def convert(params: Tree) -> Tree:
        return _convert(params, model, dtype, quantize, stored, tensor, layout)

    structs = jax.eval_shape(convert, abstract_params(model, "float32"))
    shardings = (
        jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), structs)
        if placement is None
        else decode_shardings(structs, model, placement, layout)
    )
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        structs,
        shardings,
    )


def _sync_metrics(decode: Tree, started: float) -> dict[str, float]:
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(decode))
    return {"handover/bytes": float(size), "time/handover_s": time.perf_counter() - started}


def _is_disaggregated(params: Tree, placement: Placement) -> bool:
    """Returns whether the rollout's devices differ from those of the parameters."""
    param_devices = jax.tree.leaves(params)[0].sharding.device_set
    return param_devices != set(placement.mesh.devices.flat)


def sync_weights(
    params: Tree,
    model: ModelConfig,
    dtype: str,
    quantize: str = "off",
    stored: bool | None = None,
    *,
    placement: Placement | None = None,
    layout: Layout = "decode",
) -> tuple[Tree, dict[str, float]]:
    """Returns the decoding copy of training parameters (in a decode layout, in `dtype`), and the
    metrics of the sync: bytes and seconds.

    On the training's devices the layout changes within the jitted function. Separate rollout
    devices receive the weights converted and sharded on the training's devices.

    Args:
        params: training parameters in either layout.
        model: the model.
        dtype: type of the decoding weights.
        quantize: rollout.quantize; scales are computed from the unrounded parameters.
        stored: stores 8-bit weights as values and scales (model/quantize.py) instead of emulating
            them; None: True except on CPU.
        placement: the decoding mesh.
        layout: the decode layout.
    """
    started, stored = (
        time.perf_counter(),
        jax.default_backend() != "cpu" if stored is None else stored,
    )
    program = sync_program(
        params, model, dtype, resolve(quantize), stored, placement=placement, layout=layout
    )
    decode = program.function(*program.arguments, **program.keywords)
    if placement is not None and _is_disaggregated(params, placement):
        decode = jax.device_put(decode, decode_shardings(decode, model, placement, layout))
    # Waits, so that the metrics have the time of the whole sync.
    decode = jax.block_until_ready(decode)
    return decode, _sync_metrics(decode, started)
