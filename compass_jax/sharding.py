"""Where arrays lie: tables from logical axes to mesh axes, for parameters in storage, for
training's activations and for decoding.

A `Placement` is a mesh and how activations lie on it. Models, engines and steps take one, or None
for a single device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from compass_jax.config import ConfigError, MeshConfig

AXES = ("replica", "fsdp", "expert", "tensor", "context")
SPLIT = {
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffn": "tensor",
    "expert_ffn": "tensor",
    "vocab": "tensor",
    "expert": "expert",
}
STORE = {**SPLIT, "embed": ("fsdp", "context")}
BATCH = {"train": ("replica", "fsdp", "expert"), "decode": ("replica", "fsdp", "expert", "context")}


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh over `devices` (None: the first of all devices). ConfigError where there are too
    few.
    """
    have = jax.devices() if devices is None else devices
    if len(have) < config.devices:
        axes = ", ".join(
            f"{name} {n}" for name, n in zip(AXES, astuple(config), strict=True) if n > 1
        )
        raise ConfigError(
            f"the mesh of {axes} needs {config.devices} devices, there are {len(have)}: lower one"
            " of its axes"
        )
    return Mesh(
        np.asarray(have[: config.devices]).reshape(astuple(config)),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
    )


@dataclass(frozen=True)
class Placement:
    """A mesh, and whether it trains (rows over replica, fsdp and expert, tokens over context) or
    decodes (slots over these and context).
    """

    mesh: Mesh
    use: Literal["train", "decode"] = "train"

    def size(self, *axes: str) -> int:
        """Devices along these mesh axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def rows_multiple(self) -> int:
        """Rows that a batch of training must be a multiple of."""
        return self.size(*BATCH[self.use])

    def batch_axes(self, rows: int) -> tuple[str, ...]:
        """The mesh axes over which `rows` are split: as many of them, in their order, as divide the
        number. Along others the rows are repeated.
        """
        taken: list[str] = []
        for axis in BATCH[self.use]:
            if rows % self.size(*taken, axis) == 0 and self.mesh.shape[axis] > 1:
                taken.append(axis)
        return tuple(taken)

    def token_axis(self, tokens: int) -> str | None:
        """The mesh axis over which the tokens of a row are split, where they divide."""
        n = self.mesh.shape["context"]
        return "context" if self.use == "train" and n > 1 and tokens % n == 0 else None

    def spec(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> PartitionSpec:
        """Of an array of this shape whose axes are "batch", "tokens", a name of SPLIT, or None."""
        parts: list[Any] = []
        for size, axis in zip(shape, axes, strict=True):
            if axis == "batch":
                parts.append(self.batch_axes(size) or None)
            else:
                parts.append(self.token_axis(size) if axis == "tokens" else SPLIT.get(axis or ""))
        return PartitionSpec(*parts)

    def rows(self, count: int) -> NamedSharding:
        """Of an array of `count` rows."""
        return self.sharding(self.batch_axes(count) or None)

    def sharding(self, *parts: Any) -> NamedSharding:
        """On this mesh, by mesh axes."""
        return NamedSharding(self.mesh, PartitionSpec(*parts))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """`x`, laid out by its logical axes."""
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh, self.spec(x.shape, axes))
        )

    def param_sharding(self, axes: tuple[str | None, ...], table: dict[str, Any]) -> NamedSharding:
        """Of a parameter by its logical axes; `table`: STORE or SPLIT."""
        return self.sharding(*(table.get(axis or "") for axis in axes))


def placements(
    train: MeshConfig,
    rollout: MeshConfig | None,
    disaggregated: bool,
    devices: list[jax.Device] | None = None,
) -> tuple[Placement | None, Placement | None]:
    """(training's, the rollout's): None where one device does both. On the same devices unless
    `disaggregated`: then the rollout's are those after.

    devices: which there are (None: all). Both meshes on the same ones take them in one order, as a
    program that has arrays of both must.
    """
    rollout, have = rollout or train, jax.devices() if devices is None else devices
    if devices is None:
        _check_processes(train, disaggregated)
    if train.devices == rollout.devices == 1 and not disaggregated:
        return None, None
    first = _by_torus(train, have[: train.devices])
    rest = _by_torus(rollout, have[train.devices :][: rollout.devices]) if disaggregated else first
    return Placement(make_mesh(train, first)), Placement(make_mesh(rollout, rest), "decode")


def _by_torus(config: MeshConfig, devices: list[jax.Device]) -> list[jax.Device]:
    """TPU devices so ordered that neighbours on the mesh are neighbours on the torus; others as
    they come.
    """
    if not devices or devices[0].platform != "tpu" or len(devices) != config.devices:
        return devices
    try:
        return list(
            create_device_mesh(astuple(config), devices, allow_split_physical_axes=True).flat
        )
    except (NotImplementedError, ValueError):  # a part of a torus that has no shape of its own
        return devices


def _check_processes(train: MeshConfig, disaggregated: bool) -> None:
    """Several processes run one program: a process without devices in a mesh could not take part in
    it.
    """
    have, processes = jax.device_count(), jax.process_count()
    if processes == 1:
        return
    if disaggregated:
        raise ConfigError(
            f"rollout_apart over {processes} processes: each must take part in both the rollout and"
            " the training; set it to False"
        )
    if train.devices != have:
        raise ConfigError(
            f"mesh has {train.devices} devices, the {processes} processes have {have}: a mesh over"
            " several processes takes all"
        )


def put(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """`x`, which this process has whole, laid out by `sharding`; over several processes it is the
    same in each of them.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch(tree: Any) -> Any:
    """`jax.device_get`; what this process has only in part is gathered first, by all processes at
    the same place.
    """
    leaves, structure = jax.tree.flatten(tree)
    parts = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)
    ]
    whole = tuple(NamedSharding(leaves[i].sharding.mesh, PartitionSpec()) for i in parts)
    for i, x in zip(parts, _relay(whole)([leaves[i] for i in parts]) if parts else (), strict=True):
        leaves[i] = x
    return jax.device_get(jax.tree.unflatten(structure, leaves))


def everywhere() -> jax.sharding.Sharding:
    """A copy on every device of every process."""
    return NamedSharding(Mesh(np.asarray(jax.devices()), ("all",)), PartitionSpec())


def move(tree: Any, shardings: Any) -> Any:
    """`tree` laid out by `shardings`: only leaves that lie elsewhere move, on the same devices
    never off them; from others perhaps via the host.
    """
    leaves = jax.tree.leaves(tree)
    structure: Any = jax.tree.structure(tree)
    wanted = structure.flatten_up_to(shardings)
    moving = [
        i
        for i, (x, s) in enumerate(zip(leaves, wanted, strict=True))
        if not x.sharding.is_equivalent_to(s, x.ndim)
    ]
    here = [i for i in moving if ordered(leaves[i].sharding) == ordered(wanted[i])]
    for i, x in zip(
        here, _relay(tuple(wanted[i] for i in here))([leaves[i] for i in here]), strict=True
    ):
        leaves[i] = x
    for i in set(moving).difference(here):
        leaves[i] = (
            put(leaves[i], wanted[i])
            if leaves[i].is_fully_addressable
            else jax.device_put(leaves[i], wanted[i])
        )
    return jax.tree.unflatten(structure, leaves)


def ordered(sharding: jax.sharding.Sharding) -> tuple[jax.Device, ...]:
    """Its devices in the order in which a program has them, on a torus seldom that of their
    numbers; arrays of two orders share no program.
    """
    mesh = getattr(sharding, "mesh", None)
    return tuple(
        sorted(sharding.device_set, key=lambda device: device.id)
        if mesh is None
        else mesh.devices.flat
    )


@cache
def _relay(shardings: tuple[NamedSharding, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda leaves: leaves, out_shardings=list(shardings))


def constrain(placement: Placement | None, x: jax.Array, *axes: str | None) -> jax.Array:
    """`Placement.constrain`; on a single device, `x`."""
    return x if placement is None else placement.constrain(x, *axes)
