"""A load in which several processes read each byte once. A column of a matrix lies in all pages of
its tensor: processes that read the columns of their devices would together read every tensor many
times. They read rows instead, and send the columns to each other, one mesh axis after the other.
The compiler's own exchange between two shardings may hold the whole array on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from compass_jax.base.aliases import Tree
from compass_jax.devices.distributed import process_index_and_count
from compass_jax.weights.lazy import LazyArray

Parts = list[list[str]]  # the mesh axes that split each axis of an array


class Move(NamedTuple):
    """A mesh axis that splits the array's axis `start`, and then its axis `end` (None: none)."""

    name: str
    start: int
    end: int | None


def loaded(x: LazyArray, sharding: Sharding) -> jax.Array:
    """Returns the array with a sharding. Several processes read rows where `rows_first` has moves,
    else the parts of their devices.
    """
    if process_index_and_count()[1] > 1 and isinstance(sharding, NamedSharding):
        rows, moves = rows_first(x, sharding)
        if moves:
            return exchange(rows, moves, sharding)(_read(x, rows))
    return _read(x, sharding)


def _read(x: LazyArray, sharding: Sharding) -> jax.Array:
    read: Tree = x.read  # jax's type allows None for an index, which a sharding never gives
    return jax.make_array_from_callback(x.shape, sharding, read)


def exchange(
    rows: NamedSharding, moves: list[Move], sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    """Returns the program that brings an array from the sharding `rows` to another."""

    def send(x: jax.Array) -> jax.Array:
        for name, start, end in moves:
            if end is None:
                x = jax.lax.all_gather(x, name, axis=start, tiled=True)
            else:
                x = jax.lax.all_to_all(x, name, split_axis=end, concat_axis=start, tiled=True)
        return x

    sent = jax.shard_map(
        send, mesh=sharding.mesh, in_specs=rows.spec, out_specs=sharding.spec, check_vma=False
    )
    return jax.jit(sent, out_shardings=sharding)


def rows_first(x: LazyArray, sharding: NamedSharding) -> tuple[NamedSharding, list[Move]]:
    """Returns a sharding that splits the outermost axes of the array's file over all devices, and
    the moves from it to `sharding`; `sharding` itself without moves where they have no order.
    """
    spec = [*sharding.spec, *[None] * (len(x.shape) - len(sharding.spec))]
    ends = [list(names) if isinstance(names, tuple) else [names] * bool(names) for names in spec]
    ends = [[name for name in names if sharding.mesh.shape[name] > 1] for names in ends]
    starts, moves = _starts(x, sharding, ends)
    rows = NamedSharding(sharding.mesh, PartitionSpec(*[tuple(x) or None for x in starts]))
    ordered, parts = list[Move](), starts  # `rows` has a copy
    while moves:
        move = next((move for move in moves if _is_possible(move, parts, ends)), None)
        if move is None:
            return sharding, []
        moves.remove(move)
        ordered.append(move)
        parts[move.start].remove(move.name)
        if move.end is not None:
            parts[move.end].append(move.name)
    return (rows, ordered) if parts == ends else (sharding, [])


def _starts(x: LazyArray, sharding: NamedSharding, ends: Parts) -> tuple[Parts, list[Move]]:
    """Returns the mesh axes that split each axis of the array while it is read, and the moves. A
    mesh axis stays where it splits a stack of tensors, or the first axis that it can.
    """
    free, staying, moves = list(x.shape), [list[str]() for _ in ends], list[Move]()
    places = {name: i for i, names in enumerate(ends) for name in names}
    stacks = range(len(x.shape) - 2)
    names = [name for name, size in sharding.mesh.shape.items() if size > 1]
    # Those that split no axis at the end come last: they leave any axis.
    for name in sorted(names, key=lambda x: (places.get(x) not in stacks, x not in places)):
        size, end = sharding.mesh.shape[name], places.get(name)
        axes = x.axes if end is None or end not in stacks else (end, *x.axes)
        start = next((axis for axis in axes if free[axis] % size == 0), None)
        if start is None:
            continue
        free[start] //= size
        if start == end:
            staying[start].append(name)
        else:
            moves.append(Move(name, start, end))
    # The last mesh axis of an array's axis is the first that leaves it.
    leaving = [[move.name for move in moves[::-1] if move.start == i] for i in range(len(ends))]
    return [[*a, *b] for a, b in zip(staying, leaving, strict=True)], moves


def _is_possible(move: Move, parts: Parts, ends: Parts) -> bool:
    """Returns whether a move keeps the order of the array: the mesh axis is the last of its axis,
    and comes behind those that stay where it goes.
    """
    if parts[move.start][-1] != move.name:
        return False
    if move.end is None:
        return True
    arrived = [*parts[move.end], move.name]
    return arrived == ends[move.end][: len(arrived)]
