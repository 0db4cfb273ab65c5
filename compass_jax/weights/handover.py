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
from compass_jax.model.params import Layout, abstract_params, decode_shardings, to_decode
from compass_jax.model.quantize import eight_bit, emulate, kind_for
from compass_jax.sharding import BATCH, STORE, Placement, make_mesh, ordered


def _convert(
    params: Any, dtype: str, quantize: str, stored: bool, tensor: int, layout: Layout
) -> Any:
    return (eight_bit if stored else emulate)(to_decode(params, tensor, layout), quantize, dtype)


_STATIC = ("dtype", "quantize", "stored", "tensor", "layout")
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
    """The jitted function of `hand_over` whose results lie as the decoding mesh `placement` has
    them; source: the training's mesh.
    """
    options = {
        "dtype": dtype,
        "quantize": quantize,
        "stored": stored,
        "tensor": tensor,
        "layout": layout,
    }
    abstract = jax.eval_shape(partial(_convert, **options), abstract_params(model, "float32"))

    def convert(params):
        if source is not None:
            tables = {name: axis for name, axis in (("embed", 0), ("head", 1)) if name in params}
            params = {
                **params,
                **{
                    name: _by_vocabulary(params[name], axis, source, placement)
                    for name, axis in tables.items()
                },
            }
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


def hand_over(
    params: Any,
    dtype: str,
    quantize: str = "off",
    stored: bool | None = None,
    *,
    model: ModelConfig | None = None,
    placement: Placement | None = None,
    layout: Layout = "decode",
) -> tuple[Any, dict[str, float]]:
    """The decoding copy (in a decode layout, in `dtype`) of training parameters in either layout;
    and its bytes and seconds.

    quantize: rollout.quantize; the scales come from the unrounded parameters. stored: 8-bit weights
    as values and scales (model/quantize.py); else emulated; None: stored unless this is a CPU.
    placement (with `model`): the mesh that decodes. On the training's devices the layout changes
    within the jitted function; other devices get what was converted and cut on the training's.
    ValueError for a placement without model.
    """
    if placement is not None and model is None:
        raise ValueError("hand_over: placement needs model, whose axes say what is split")
    started, stored = (
        time.perf_counter(),
        jax.default_backend() != "cpu" if stored is None else stored,
    )
    quantize = resolve(quantize)
    if placement is None:
        decode = _convert_here(
            params, dtype=dtype, quantize=quantize, stored=stored, tensor=1, layout=layout
        )
    elif jax.tree.leaves(params)[0].sharding.device_set == set(placement.mesh.devices.flat):
        mesh = getattr(jax.tree.leaves(params)[0].sharding, "mesh", None)
        decode = converter(
            model, placement, dtype, quantize, stored, placement.size("tensor"), layout, mesh
        )(params)
    else:
        there = converter(
            model,
            near(params, placement),
            dtype,
            quantize,
            stored,
            placement.size("tensor"),
            layout,
            None,
        )(params)
        decode = jax.device_put(there, decode_shardings(there, model, placement, layout))
    decode = jax.block_until_ready(decode)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(decode))
    return decode, {"handover/bytes": float(size), "time/handover_s": time.perf_counter() - started}
