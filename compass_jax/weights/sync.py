"""Training parameters -> rollout parameters in one jitted function; 8-bit weights are emulated on
CPU alone.

Nothing passes the host, with one exception: a rollout on devices of its own whose cut the
training's devices cannot make (`near`).
"""

from __future__ import annotations

import math
import time
from functools import cache, partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from compass_jax.config import MeshConfig, ModelConfig
from compass_jax.model.params import (
    Layout,
    abstract_params,
    decode_shardings,
    is_spec,
    param_specs,
    to_decode,
)
from compass_jax.model.quantize import eight_bit, emulate, kind_for
from compass_jax.programs import Program
from compass_jax.sharding import BATCH, STORE, Placement, make_mesh, ordered


def _convert(
    params: Any,
    model: ModelConfig,
    dtype: str,
    quantize: str,
    stored: bool,
    tensor: int,
    layout: Layout,
) -> Any:
    decode, specs = to_decode(params, tensor, layout), param_specs(model, layout)
    return (eight_bit if stored else emulate)(decode, specs, quantize, dtype)


_STATIC = ("model", "dtype", "quantize", "stored", "tensor", "layout")
_convert_here = partial(jax.jit, static_argnames=_STATIC)(_convert)


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
    """The jitted function of `sync_weights` whose results lie as the decoding mesh `placement` has
    them; source: the training's mesh.
    """
    options: dict[str, Any] = {
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
    """An embedding on its way between meshes: cut along the vocabulary (`axis`) as finely as it was
    cut along the hidden axis, then the same parts where the decoding mesh wants them. Without these
    steps the compiler gives every device the whole table, and then cuts it.

    Unchanged where the decoding mesh has no axes that make as many parts.
    """
    mine = [name for name in ("tensor", *STORE["embed"]) if source.shape[name] > 1]
    parts, theirs = math.prod(source.shape[name] for name in mine), ["tensor"]
    for name in BATCH["decode"]:
        if placement.size(*theirs, name) <= parts:
            theirs.append(name)
    if placement.size(*theirs) != parts or x.shape[axis] % parts:
        return x
    for mesh, names in ((source, mine), (placement.mesh, theirs)):
        spec = PartitionSpec(*(None,) * axis, tuple(names), *(None,) * (x.ndim - 1 - axis))
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return x


def near(params: Any, placement: Placement) -> Placement:
    """A mesh over the devices that have `params`, which cuts matrices as `placement` does: what it
    holds is then copied, device to device.

    Where these are too few or do not divide, a mesh that cuts nothing: the copies then go through
    the host.
    """
    devices = list(ordered(jax.tree.leaves(params)[0].sharding))
    cut = {axis: placement.size(axis) for axis in ("expert", "tensor")}
    if len(devices) % math.prod(cut.values()):
        cut = {"expert": 1, "tensor": 1}
    return Placement(
        make_mesh(MeshConfig(replica=len(devices) // math.prod(cut.values()), **cut), devices),
        "decode",
    )


def resolve(quantize: str) -> str:
    """rollout.quantize with "auto" as what the first device multiplies fast."""
    return kind_for(jax.devices()[0].device_kind) if quantize == "auto" else quantize


def sync_program(
    params: Any,
    model: ModelConfig,
    dtype: str,
    quantize: str,
    stored: bool,
    *,
    placement: Placement | None,
    layout: Layout,
) -> Program:
    """The program of `sync_weights`, for parameters or structs of them. Where other devices decode,
    what it gives is still to be copied to them.
    """
    if placement is None:
        keywords = {"model": model, "dtype": dtype, "quantize": quantize, "stored": stored}
        keywords |= {"tensor": 1, "layout": layout}
        return Program("hand-over", _convert_here, (params,), keywords)
    there, source = placement, None
    if _apart(params, placement):
        there = near(params, placement)
    else:
        source = getattr(jax.tree.leaves(params)[0].sharding, "mesh", None)
    options = (dtype, quantize, stored, placement.size("tensor"), layout)
    return Program("hand-over", converter(model, there, *options, source), (params,))


def _apart(params: Any, placement: Placement) -> bool:
    """Whether other devices decode than those that have the parameters."""
    here = jax.tree.leaves(params)[0].sharding.device_set
    return here != set(placement.mesh.devices.flat)


def sync_weights(
    params: Any,
    model: ModelConfig,
    dtype: str,
    quantize: str = "off",
    stored: bool | None = None,
    *,
    placement: Placement | None = None,
    layout: Layout = "decode",
) -> tuple[Any, dict[str, float]]:
    """The decoding copy (in a decode layout, in `dtype`) of training parameters in either layout;
    and its bytes and seconds.

    quantize: rollout.quantize; the scales come from the unrounded parameters. stored: 8-bit weights
    as values and scales (model/quantize.py); else emulated; None: stored unless this is a CPU.
    placement: the mesh that decodes. On the training's devices the layout changes
    within the jitted function; other devices get what was converted and cut on the training's.
    """
    started, stored = (
        time.perf_counter(),
        jax.default_backend() != "cpu" if stored is None else stored,
    )
    program = sync_program(
        params, model, dtype, resolve(quantize), stored, placement=placement, layout=layout
    )
    decode = program.function(*program.arguments, **program.keywords)
    if placement is not None and _apart(params, placement):
        decode = jax.device_put(decode, decode_shardings(decode, model, placement, layout))
    decode = jax.block_until_ready(decode)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(decode))
    return decode, {"handover/bytes": float(size), "time/handover_s": time.perf_counter() - started}
