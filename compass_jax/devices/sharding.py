"""Shardings: tables from logical axes to mesh axes, for parameters in storage, for training's
activations and for decoding.

A `Placement` is a mesh with the layout of activations. Models, engines and steps take one, or None
for a single device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache
from typing import Literal

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from compass_jax.base.aliases import Tree
from compass_jax.config import ConfigError, MeshConfig

AXES = ("replica", "fsdp", "expert", "tensor", "context")
# Logical axis -> mesh axes. SPLIT: activations, and parameters as the model computes with them;
# STORE: parameters in storage, whose hidden size is split too (FSDP).
SPLIT = {
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffn": "tensor",
    "expert_ffn": "tensor",
    "vocab": "tensor",
    "expert": "expert",
}
STORE = {**SPLIT, "embed": ("fsdp", "context"), "latent": ("fsdp", "context")}
# Decoding has one token per row, so the context axis splits rows there.
BATCH = {"train": ("replica", "fsdp", "expert"), "decode": ("replica", "fsdp", "expert", "context")}


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns the mesh over `devices` (None: all). Raises ConfigError for too few devices."""
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
    """A mesh and its use: training (rows over replica, fsdp and expert, tokens over context) or
    decode (slots over these and context).
    """

    mesh: Mesh
    use: Literal["train", "decode"] = "train"

    def size(self, *axes: str) -> int:
        """Returns the number of devices along these mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def rows_multiple(self) -> int:
        """The number that a training batch's rows must be a multiple of."""
        return self.size(*BATCH[self.use])

    def batch_axes(self, rows: int) -> tuple[str, ...]:
        """Returns the mesh axes over which `rows` are split: in order, as long as they divide the
        number. Rows are replicated along other axes.
        """
        axes: list[str] = []
        for axis in BATCH[self.use]:
            if rows % self.size(*axes, axis) == 0 and self.mesh.shape[axis] > 1:
                axes.append(axis)
        return tuple(axes)

    def token_axis(self, tokens: int) -> str | None:
        """Returns the axis over which a row's tokens are split; None if it does not divide them."""
        n = self.mesh.shape["context"]
        return "context" if self.use == "train" and n > 1 and tokens % n == 0 else None

    def spec(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> PartitionSpec:
        """Returns the partition of a shape by axes: "batch", "tokens", a name of SPLIT, or None."""
        parts: list[Tree] = []
        for size, axis in zip(shape, axes, strict=True):
            if axis == "batch":
                parts.append(self.batch_axes(size) or None)
            else:
                parts.append(self.token_axis(size) if axis == "tokens" else SPLIT.get(axis or ""))
        return PartitionSpec(*parts)

    def rows(self, count: int) -> NamedSharding:
        """Returns the sharding of an array of `count` rows."""
        return self.sharding(self.batch_axes(count) or None)

    def sharding(self, *parts: Tree) -> NamedSharding:
        """Returns a sharding on this mesh by mesh axes."""
        return NamedSharding(self.mesh, PartitionSpec(*parts))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrains `x` to the sharding of its logical axes."""
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh, self.spec(x.shape, axes))
        )

    def param_sharding(self, axes: tuple[str | None, ...], table: dict[str, Tree]) -> NamedSharding:
        """Returns the sharding of a parameter by its logical axes; `table` is STORE or SPLIT."""
        return self.sharding(*(table.get(axis or "") for axis in axes))


def placements(
    train: MeshConfig,
    rollout: MeshConfig | None,
    disaggregated: bool,
    devices: list[jax.Device] | None = None,
) -> tuple[Placement | None, Placement | None]:
    """Returns the placements of training and rollout; None where a single device does both. They
    use the same devices unless `disaggregated`, in which case the rollout's come after training's.

    Args:
        devices: available devices (None: all). Meshes on the same devices have them in the same
            order, as a program with arrays of both requires.
    """
    rollout, have = rollout or train, jax.devices() if devices is None else devices
    if devices is None:
        _check_processes(train, disaggregated)
    if train.devices == rollout.devices == 1 and not disaggregated:
        return None, None
    if disaggregated and train.devices + rollout.devices > len(have):
        raise ConfigError(
            f"rollout_apart: mesh ({train.devices}) and rollout_mesh ({rollout.devices}) together"
            f" need {train.devices + rollout.devices} devices, there are {len(have)}: lower an"
            " axis of one of them"
        )
    first = _by_torus(train, have[: train.devices])
    if not disaggregated and first and first[0].platform == "tpu":
        _check_slices(rollout, _slices(first), "rollout_mesh")
    rollout_devices = (
        _by_torus(rollout, have[train.devices :][: rollout.devices]) if disaggregated else first
    )
    return Placement(make_mesh(train, first)), Placement(
        make_mesh(rollout, rollout_devices), "decode"
    )


def _by_torus(config: MeshConfig, devices: list[jax.Device]) -> list[jax.Device]:
    """Orders TPU devices so that neighbours on the mesh are neighbours on the torus, and so that
    slices differ in replica, then in fsdp, alone: these axes send the least for each step over the
    network between slices. Raises ConfigError if no such order exists.
    """
    if not devices or devices[0].platform != "tpu" or len(devices) != config.devices:
        return devices
    slices = _slices(devices)
    _check_slices(config, slices, "mesh")
    # The slices are spread over replica as far as it divides them, and over fsdp for the rest.
    over_replica = math.gcd(config.replica, slices)
    outer = (over_replica, slices // over_replica, 1, 1, 1)
    inner = [n // of_slices for n, of_slices in zip(astuple(config), outer, strict=True)]
    try:
        mesh = (
            create_device_mesh(inner, devices, allow_split_physical_axes=True)
            if slices == 1
            else create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
        )
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        axes = ", ".join(f"{name} {n}" for name, n in zip(AXES, astuple(config), strict=True))
        why = (
            "jax finds no order of them for these axes: choose others, such as powers of two"
            if _are_boxes(devices)
            else "they form no box on the torus: change their number, such as to a power of two"
        )
        raise ConfigError(
            f"the mesh of {axes} cannot be laid on {len(devices)} TPU devices, {why}"
        ) from error
    return list(mesh.flat)


def _slices(devices: list[jax.Device]) -> int:
    return len({getattr(device, "slice_index", 0) for device in devices})


def _check_slices(config: MeshConfig, slices: int, key: str) -> None:
    """Raises ConfigError for a mesh whose replica and fsdp cannot be split over the slices."""
    if config.fsdp % (slices // math.gcd(config.replica, slices)):
        raise ConfigError(
            f"the devices are {slices} slices, over which {key}.replica = {config.replica} and"
            f" {key}.fsdp = {config.fsdp} cannot be split evenly: make {key}.replica a multiple of"
            f" {slices}"
        )


def _are_boxes(devices: list[Tree]) -> bool:
    """Returns whether the chips of each slice fill a box on its torus."""
    chips: dict[int, set[tuple[int, ...]]] = {}
    for device in devices:
        chips.setdefault(getattr(device, "slice_index", 0), set()).add(tuple(device.coords))
    return all(
        len(places) == math.prod(max(x) - min(x) + 1 for x in zip(*places, strict=True))
        for places in chips.values()
    )


def _check_processes(train: MeshConfig, disaggregated: bool) -> None:
    """Raises ConfigError for a mesh that leaves out a process's devices."""
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


def put(x: Tree, sharding: jax.sharding.Sharding) -> jax.Array:
    """Moves a host array `x` to `sharding`; over several processes it must be the same in each."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    # The callback is called only for shards of this process, so no data is exchanged.
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch(tree: Tree) -> Tree:
    """Calls `jax.device_get`; gathers parts first, so all processes must call it together."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)
    ]
    replicated = tuple(NamedSharding(leaves[i].sharding.mesh, PartitionSpec()) for i in parts)
    for i, x in zip(
        parts, _relay(replicated)([leaves[i] for i in parts]) if parts else (), strict=True
    ):
        leaves[i] = x
    return jax.device_get(jax.tree.unflatten(structure, leaves))


def everywhere() -> jax.sharding.Sharding:
    """Returns the sharding that replicates on every device of every process."""
    return NamedSharding(Mesh(np.asarray(jax.devices()), ("all",)), PartitionSpec())


def move(tree: Tree, shardings: Tree) -> Tree:
    """Moves `tree` to `shardings`. Only leaves with another sharding move: between the same devices
    without the host, else possibly through it.
    """
    leaves = jax.tree.leaves(tree)
    structure: Tree = jax.tree.structure(tree)
    targets = structure.flatten_up_to(shardings)
    moving = [
        i
        for i, (x, s) in enumerate(zip(leaves, targets, strict=True))
        if not x.sharding.is_equivalent_to(s, x.ndim)
    ]
    # Arrays of one program must have the same devices in the same order.
    same_devices = [i for i in moving if ordered(leaves[i].sharding) == ordered(targets[i])]
    for i, x in zip(
        same_devices,
        _relay(tuple(targets[i] for i in same_devices))([leaves[i] for i in same_devices]),
        strict=True,
    ):
        leaves[i] = x
    for i in set(moving).difference(same_devices):
        leaves[i] = (
            # An array with shards in other processes has no host copy here that `put` could read.
            put(leaves[i], targets[i])
            if leaves[i].is_fully_addressable
            else jax.device_put(leaves[i], targets[i])
        )
    return jax.tree.unflatten(structure, leaves)


def ordered(sharding: jax.sharding.Sharding) -> tuple[jax.Device, ...]:
    """Returns the sharding's devices in program order, which on a torus is seldom the order of
    their ids; arrays of two orders cannot share a program.
    """
    mesh = getattr(sharding, "mesh", None)
    return tuple(
        sorted(sharding.device_set, key=lambda device: device.id)
        if mesh is None
        else mesh.devices.flat
    )


# Cached, because every new jit function would be traced and compiled again.
@cache
def _relay(shardings: tuple[NamedSharding, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda leaves: leaves, out_shardings=list(shardings))


def constrain(placement: Placement | None, x: jax.Array, *axes: str | None) -> jax.Array:
    """Calls `Placement.constrain`; returns `x` unchanged on a single device."""
    return x if placement is None else placement.constrain(x, *axes)
