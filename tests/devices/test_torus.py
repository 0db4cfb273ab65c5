"""The order of TPU chips on the mesh: neighbours on the torus, and slices along the outer axes. The
chips are stand-ins with coordinates."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest

from compass_jax.config import ConfigError, MeshConfig
from compass_jax.devices import sharding
from compass_jax.devices.sharding import AXES, placements


class Chip(NamedTuple):
    id: int
    coords: tuple[int, int, int]
    slice_index: int
    core_on_chip: int = 0
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5"


def chips(sides, slices=1):
    places = itertools.product(range(slices), *(range(n) for n in sides))
    return [Chip(i, tuple(coords), number) for i, (number, *coords) in enumerate(places)]


@pytest.fixture
def grid(monkeypatch):
    """Returns a function that places chips on a mesh: it returns each chip's slice and coordinates,
    [*axes 4], in training and in the rollout.
    """

    def numbers(config, devices):
        places = [(x.slice_index, *x.coords) for x in devices]
        return np.array(places).reshape(*(getattr(config, axis) for axis in AXES), 4)

    monkeypatch.setattr(sharding, "make_mesh", numbers)
    monkeypatch.setattr(sharding, "Placement", lambda mesh, *use: mesh)
    return lambda config, devices, rollout=None: placements(
        config, rollout, rollout is not None, devices
    )


def steps(mesh, axis):
    """Returns the distances between neighbours on an axis of the mesh, on a torus of 4 chips a
    side.
    """
    away = np.abs(np.diff(mesh[..., 1:], axis=AXES.index(axis)))
    return np.minimum(away, 4 - away).sum(-1)


def test_neighbours_on_the_mesh_are_neighbours_on_the_torus(grid):
    mesh, _ = grid(MeshConfig(fsdp=4, expert=4, context=4), chips((4, 4, 4))[::-1])
    assert all((steps(mesh, axis) == 1).all() for axis in ("fsdp", "expert", "context"))


@pytest.mark.parametrize(
    "config,outer",
    [
        (MeshConfig(replica=2, fsdp=4, expert=16), {"replica"}),
        (MeshConfig(replica=4, fsdp=2, expert=16), {"replica"}),
        (MeshConfig(fsdp=8, expert=16), {"fsdp"}),
    ],
)
def test_slices_differ_along_the_outer_axis_alone(grid, config, outer):
    mesh, _ = grid(config, chips((4, 4, 4), slices=2))
    differ = {x for i, x in enumerate(AXES) if np.diff(mesh[..., 0], axis=i).any()}
    assert differ == outer
    changes = np.diff(mesh[..., 0], axis=AXES.index(*outer)) != 0
    assert changes.sum(AXES.index(*outer)).max() == 1  # each slice is one block


def test_slices_of_both_outer_axes(grid):
    mesh, _ = grid(MeshConfig(replica=2, fsdp=32), chips((4, 4, 1), slices=4))
    assert [len(set(mesh[i, ..., 0].flat)) for i in range(2)] == [2, 2]


def test_a_mesh_that_the_slices_do_not_hold_is_refused(grid):
    with pytest.raises(
        ConfigError, match=r"3 slices, .*mesh.replica = 2 and mesh.fsdp = 8 .*multiple of 3"
    ):
        grid(MeshConfig(replica=2, fsdp=8, expert=3), chips((4, 4, 1), slices=3))


@pytest.mark.parametrize("count", [7, 24])
def test_a_part_of_a_torus_that_is_no_box_is_refused(grid, count):
    """Such a mesh once ran in the order of the chips' numbers, regardless of their neighbours."""
    with pytest.raises(ConfigError, match=rf"fsdp {count}, .* {count} TPU devices, .*no box"):
        grid(MeshConfig(fsdp=count), chips((4, 4, 4))[:count])


@pytest.mark.parametrize("config", [MeshConfig(fsdp=10, expert=32), MeshConfig(5, 2, 1, 4, 8)])
def test_a_torus_that_jax_finds_no_order_for_is_named_so(grid, config):
    with pytest.raises(ConfigError, match="jax finds no order"):
        grid(config, chips((4, 4, 20)))


def test_a_rollout_whose_experts_would_be_on_two_slices_is_refused(grid):
    train = MeshConfig(replica=2, fsdp=4, expert=16)
    with pytest.raises(ConfigError, match=r"rollout_mesh\.replica = 1 .*multiple of 2"):
        placements(train, MeshConfig(expert=16, tensor=8), False, chips((4, 4, 4), slices=2))


def test_meshes_of_their_own_devices_are_each_laid_on_their_part(grid):
    half = MeshConfig(fsdp=4, expert=8)
    train, rollout = grid(half, chips((4, 4, 4)), MeshConfig(expert=32))
    assert set(train[..., 1].flat) == {0, 1} and set(rollout[..., 1].flat) == {2, 3}
