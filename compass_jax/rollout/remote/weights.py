"""Weights from the training's devices to the samplers', piece by piece, by jax's transfer servers.

Every process of the training serves the pieces that its devices hold; every process of a sampler
pulls those that its devices need. No process holds more of a leaf than the pieces it pulls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import transfer
from jax.sharding import Sharding, SingleDeviceSharding

from compass_jax.base.aliases import Tree
from compass_jax.rollout.remote.frames import SamplersError

LEAF_S = 600  # within which a leaf must have come
POLL_S = 0.002

Bounds = tuple[tuple[int, int], ...]  # (start, stop) along each axis


class Pull(NamedTuple):
    """The pieces of one leaf that one process of a sampler pulls from one of the training."""

    process: int
    pieces: list[Bounds]


Plan = list[list[list[Pull]]]  # by process of the sampler, by leaf


def bounds_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """Returns the bounds of a shard's index into an array."""
    sizes = zip(index, shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in sizes)


def pieces_of(tree: Tree) -> list[dict[Bounds, list[int]]]:
    """Returns for each leaf the pieces that its devices hold, with the processes that hold each."""
    return [owners_of(x.sharding, x.shape) for x in jax.tree.leaves(tree)]


def owners_of(sharding: Sharding, shape: tuple[int, ...]) -> dict[Bounds, list[int]]:
    """Returns the pieces of an array with this sharding, with the processes that hold each."""
    owners: dict[Bounds, set[int]] = {}
    indices: Tree = sharding.devices_indices_map(shape)
    for device, index in indices.items():
        owners.setdefault(bounds_of(index, shape), set()).add(device.process_index)
    return {bounds: sorted(processes) for bounds, processes in owners.items()}


def needs_of(structs: Tree, processes: int) -> list[list[list[Bounds]]]:
    """Returns the pieces that each process of a sampler needs of each leaf of these structs."""
    needs: list[list[list[Bounds]]] = [[] for _ in range(processes)]
    for x in jax.tree.leaves(structs):
        owners = owners_of(x.sharding, x.shape)
        for process, leaves in enumerate(needs):
            leaves.append([bounds for bounds, users in owners.items() if process in users])
    return needs


def plan_pulls(
    needs: Sequence[Sequence[Sequence[Bounds]]],
    pieces: Sequence[dict[Bounds, list[int]]],
    sampler: int,
) -> Plan:
    """Returns the pulls that cover `needs`. Samplers of different numbers pull from different
    processes where several hold a piece. Raises ValueError if no piece covers a need.
    """
    return [
        [
            _pulls(leaf, owners, sampler + process)
            for leaf, owners in zip(leaves, pieces, strict=True)
        ]
        for process, leaves in enumerate(needs)
    ]


def _pulls(leaf: Sequence[Bounds], owners: dict[Bounds, list[int]], turn: int) -> list[Pull]:
    pulls: dict[int, list[Bounds]] = {}
    for need in leaf:
        piece = next((piece for piece in owners if contains(piece, need)), None)
        if piece is None:
            raise ValueError(f"no process of the training holds a piece with {need}")
        processes = owners[piece]
        of_process = pulls.setdefault(processes[turn % len(processes)], [])
        if piece not in of_process:
            of_process.append(piece)
    return [Pull(process, parts) for process, parts in pulls.items()]


def contains(piece: Bounds, need: Bounds) -> bool:
    """Returns whether `need` lies within `piece`."""
    return all(a <= c and d <= b for (a, b), (c, d) in zip(piece, need, strict=True))


class WeightServer:
    """Serves pieces of this process's weights. `address` is host:port."""

    def __init__(self, host: str):
        place = f"{host}:0"
        self._server = transfer.start_transfer_server(jax.local_devices()[0].client, place, [place])
        self.address: str = self._server.address()
        self._offered: dict[int, list[jax.Array]] = {}  # transfer -> arrays on offer

    def offer(self, tree: Tree, plan: Plan, first: int) -> None:
        """Lets a sampler pull by `plan`; process p's leaf n has the number first + p * leaves + n.
        The arrays stay in memory until they are pulled, or withdrawn.
        """
        leaves, process = jax.tree.leaves(tree), jax.process_index()
        shards = [
            {bounds_of(shard.index, x.shape): shard.data for shard in x.addressable_shards}
            for x in leaves
        ]
        for number, pulls, local in _numbered(plan, first, shards):
            for pull in pulls:
                if pull.process == process:
                    arrays = [local[piece] for piece in pull.pieces]
                    self._offered[number] = arrays
                    self._server.await_pull(number, arrays)

    def forget(self, first: int, count: int, pulled: bool) -> None:
        """Forgets `count` offers from the number `first` on. Those that were not `pulled`, by a
        sampler that was lost, are replaced: a server has no other way to let go of arrays.
        """
        for number in range(first, first + count):
            if self._offered.pop(number, None) is not None and not pulled:
                self._server.await_pull(number, [jnp.zeros(())])


def _numbered(plan: Plan, first: int, leaves: Sequence[Tree]):
    """Yields (number, pulls, leaf) of every process and leaf of a plan."""
    for process, of_process in enumerate(plan):
        for n, (pulls, leaf) in enumerate(zip(of_process, leaves, strict=True)):
            yield first + process * len(leaves) + n, pulls, leaf


class WeightClient:
    """Pulls this process's part of the weights from the servers at `addresses`, by the number of
    the training's process.
    """

    def __init__(self, addresses: Sequence[str], host: str):
        place = f"{host}:0"
        self._server = transfer.start_transfer_server(jax.local_devices()[0].client, place, [place])
        self._addresses = addresses
        self._connections: dict[int, Tree] = {}

    def pull(self, structs: Tree, plan: Plan, first: int) -> Tree:
        """Returns the weights, with the shapes, types and shardings of `structs`.

        Raises jax.errors.JaxRuntimeError if the training is lost meanwhile, and SamplersError if a
        leaf does not come within LEAF_S seconds.
        """
        process, (leaves, tree) = jax.process_index(), jax.tree.flatten(structs)
        arrays = []
        for n, (x, pulls) in enumerate(zip(leaves, plan[process], strict=True)):
            # one leaf after the other, so that few pieces take memory in addition to the leaves
            number = first + process * len(leaves) + n
            arrays.append(jax.block_until_ready(self._pull_leaf(x, pulls, number)))
        return jax.tree.unflatten(tree, arrays)

    def _pull_leaf(self, x: jax.ShapeDtypeStruct, pulls: list[Pull], number: int) -> jax.Array:
        sharding: Tree = x.sharding
        indices = sharding.addressable_devices_indices_map(x.shape)
        needs = {device: bounds_of(index, x.shape) for device, index in indices.items()}
        pieces: dict[Bounds, jax.Array] = {}
        for process, parts in pulls:
            # each piece comes to a device that needs it
            users = [next(d for d, need in needs.items() if contains(p, need)) for p in parts]
            specs = [_struct(x, *part) for part in zip(parts, users, strict=True)]
            arrays = self._connection(process).pull(number, specs)
            self._wait(arrays, process)
            pieces |= zip(parts, arrays, strict=True)
        shards = [_shard(pieces, need, device) for device, need in needs.items()]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)

    def _wait(self, arrays: Sequence[Tree], process: int) -> None:
        # Polled, because block_until_ready has no timeout.
        limit = time.monotonic() + LEAF_S
        while not all(x.is_ready() for x in arrays):
            if time.monotonic() > limit:
                raise SamplersError(
                    f"no weights came from {self._addresses[process]} within {LEAF_S} s: every host"
                    " of the training must be reachable on all its ports"
                )
            time.sleep(POLL_S)

    def _connection(self, process: int) -> Tree:
        if process not in self._connections:
            self._connections[process] = self._server.connect(self._addresses[process])
        return self._connections[process]


def _struct(x: jax.ShapeDtypeStruct, piece: Bounds, device: jax.Device) -> jax.ShapeDtypeStruct:
    shape = tuple(stop - start for start, stop in piece)
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=SingleDeviceSharding(device))


def _shard(pieces: dict[Bounds, jax.Array], need: Bounds, device: jax.Device) -> jax.Array:
    """Returns the part `need` of a leaf, on `device`."""
    # A piece of the training may be larger than the shard, and another device may have pulled it.
    piece = need if need in pieces else next(p for p in pieces if contains(p, need))
    part = pieces[piece]
    if piece != need:
        offsets = zip(need, piece, strict=True)
        part = part[tuple(slice(a - c, b - c) for (a, b), (c, _) in offsets)]
    return jax.device_put(part, device)


def from_json(plan: list) -> Plan:
    """Returns the plan whose tuples JSON has turned into lists."""
    return [
        [[Pull(n, [as_bounds(x) for x in pieces]) for n, pieces in pulls] for pulls in leaves]
        for leaves in plan
    ]


def as_bounds(piece: Sequence[Sequence[int]]) -> Bounds:
    """Returns bounds that JSON has turned into lists."""
    return tuple((start, stop) for start, stop in piece)
