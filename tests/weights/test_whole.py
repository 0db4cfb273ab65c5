"""A first load over several processes reads each byte of a folder once, and sends columns."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from tiny import MODEL, random_params

from compass_jax.commands.configured import load_config
from compass_jax.config import MeshConfig
from compass_jax.devices.sharding import AXES, STORE, Placement, make_mesh
from compass_jax.model.params import abstract_params, shardings_like
from compass_jax.weights import whole
from compass_jax.weights.hf import lazy_params, load_params, save_params, tensor_leaves
from compass_jax.weights.lazy import LazyArray
from compass_jax.weights.safetensors_io import Stored

PAGE = 4096
PODS = ("qwen3_30b_a3b_v5p_4x4x4", "qwen3_235b_a22b_v5p_4x8x8", "qwen3_30b_a3b_v6e_16x16")
MOE = dataclasses.replace(MODEL.mixture, experts=4, ffn=256)
WIDE = dataclasses.replace(MODEL, layers=4, hidden=256, vocab_size=1024, ffn=512, moe=MOE)
MESHES = {
    "fsdp": MeshConfig(fsdp=8),
    "experts": MeshConfig(fsdp=4, expert=2),
    "tensor": MeshConfig(fsdp=2, expert=2, tensor=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder whose rows are shorter than a page."""
    path = tmp_path_factory.mktemp("hf") / "model"
    return save_params(random_params(WIDE), WIDE, path, "bfloat16")


@pytest.fixture
def pages(monkeypatch):
    """Returns the sets of pages of each tensor that reads touch, by tensor."""
    touched = {}

    class Piece:
        def __init__(self, piece, name):
            self.piece, self.seen = piece, touched.setdefault(name, set())

        def __getitem__(self, index):
            shape = self.piece.get_shape()
            size = np.dtype("bfloat16").itemsize
            *outer, last = [range(*x.indices(n)) for x, n in zip(index, shape, strict=True)]
            for place in itertools.product(*outer):
                row = 0
                for i, n in zip(place, shape[:-1], strict=True):
                    row = row * n + i
                first = (row * shape[-1] + last.start) * size
                end = (row * shape[-1] + last.stop) * size
                self.seen.update(range(first // PAGE, -(-end // PAGE)))
            return self.piece[index]

    opened = Stored.open
    monkeypatch.setattr(Stored, "open", lambda self, h, name: Piece(opened(self, h, name), name))
    return touched


def shardings(mesh):
    placement = Placement(make_mesh(MESHES[mesh]))
    return shardings_like(abstract_params(WIDE, "float32"), WIDE, placement)


def touched_bytes(folder, pages, mesh, place):
    """Returns the bytes of the pages that four hosts of two devices touch."""
    params, total = lazy_params(folder, WIDE, "float32"), 0
    leaves = list(zip(jax.tree.leaves(params), jax.tree.leaves(shardings(mesh)), strict=True))
    for host in range(4):
        pages.clear()
        for x, sharding in leaves:
            where = place(x, sharding).devices_indices_map(x.shape)
            for device in jax.devices()[2 * host : 2 * host + 2]:
                x.read(where[device])
        total += PAGE * sum(map(len, pages.values()))
    return total


@pytest.mark.parametrize("mesh", list(MESHES))
def test_hosts_touch_each_page_once(folder, pages, mesh):
    """Reads of columns, where the parameters are stored, touch the pages of their whole tensors."""
    size = sum(x.stat().st_size for x in folder.glob("*.safetensors"))
    assert touched_bytes(folder, pages, mesh, lambda *x: whole.rows_first(*x)[0]) < 1.5 * size
    if mesh != "tensor":
        assert touched_bytes(folder, pages, mesh, lambda _, sharding: sharding) > 2 * size


@pytest.mark.parametrize("mesh", list(MESHES))
def test_the_parameters_are_those_of_one_process(folder, monkeypatch, mesh):
    """No device holds much more than its parts of a leaf while columns are exchanged."""
    one, where = load_params(folder, WIDE, "float32"), shardings(mesh)
    monkeypatch.setattr(whole, "process_index_and_count", lambda: (0, 2))
    several = load_params(folder, WIDE, "float32", where)
    jax.tree.map(np.testing.assert_array_equal, one, several)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y, several, where))
    leaves = jax.tree.leaves(lazy_params(folder, WIDE, "float32"))
    exchanged = 0
    for x, sharding in zip(leaves, jax.tree.leaves(where), strict=True):
        rows, moves = whole.rows_first(x, sharding)
        struct = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
        program = whole.exchange(rows, moves, sharding).lower(struct).compile()
        part = x.dtype.itemsize * np.prod(sharding.shard_shape(x.shape))
        assert program.memory_analysis().temp_size_in_bytes <= 3 * part, (x.shape, moves)
        exchanged += x.nbytes * bool(moves)
    assert exchanged > 0.5 * sum(x.nbytes for x in leaves)


@pytest.mark.parametrize("name", PODS)
def test_a_pod_touches_the_bytes_of_its_model_and_half_of_them_again(name):
    """An abstract mesh: rows that several devices share are read by each; a row that is split is
    read, by whole pages, by all that have a part of it.
    """
    config = load_config(name)
    sizes = dataclasses.astuple(config.mesh)
    mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    total = {"rows": 0, "columns": 0, "all": 0}
    for leaf in tensor_leaves(config.model)[0]:
        size = 2 * math.prod(leaf.spec.shape)
        x = LazyArray(leaf.spec.shape, np.dtype("bfloat16"), None, leaf.axes)
        columns = Placement(mesh).param_sharding(leaf.spec.axes, STORE)
        total["all"] += size
        for how, sharding in (("rows", whole.rows_first(x, columns)[0]), ("columns", columns)):
            part = sharding.shard_shape(x.shape)
            row = part[x.axes[-1]] * 2  # bytes of a row that one device reads
            pages = min(PAGE, x.shape[x.axes[-1]] * 2)
            devices = math.prod(sizes) * math.prod(part) * 2
            total[how] += devices * max(1, pages // row)
    assert total["rows"] <= 1.5 * total["all"] and total["columns"] >= 2 * total["all"]
