"""The decoding kernel in interpreter mode against softmax attention in float64: rows and pages, on
one device and over a mesh.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.config import MeshConfig
from compass_jax.devices.sharding import Placement, make_mesh
from compass_jax.model import kernels
from compass_jax.model.decode_kernel import (
    _own_row,
    _page,
    _read_slots,
    block_tokens,
    decode_attention,
)
from compass_jax.model.kernels import decode_fits

B, KV, G, D, LAYERS = 4, 2, 3, 128, 2
LENGTHS = np.array([1, 300, 256, 77])


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", True)


def reference(q, k, v, lengths, window=0, sinks=None):
    """Computes attention in float64 as [b kv g d], from keys and values `[b kv s d]`."""
    out, (q, k, v) = np.zeros(q.shape), (x.astype(np.float64) for x in (q, k, v))
    for i, n in enumerate(lengths):
        seen = slice(max(0, n - window) if window else 0, n)
        scores = np.einsum("kgd,ksd->kgs", q[i], k[i, :, seen])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(
                np.asarray(sinks, np.float64).reshape(KV, G, 1) - scores.max(-1, keepdims=True)
            )
        weights /= total
        out[i] = np.einsum("kgs,ksd->kgd", weights, v[i, :, seen])
    return out


def draw(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    "mesh", [{}, {"fsdp": 2, "tensor": 2}], ids=["one device", "slots and heads over a mesh"]
)
@pytest.mark.parametrize(
    ("layer", "window", "sinks"), [(0, 0, False), (1, 0, False), (1, 130, False), (1, 130, True)]
)
def test_rows(mesh, layer, window, sinks):
    q, k, v = (
        draw(B, KV, G, D) / D**0.5,
        draw(LAYERS, B, KV, 384, D),
        draw(LAYERS, B, KV, 384, D)[::-1].copy(),
    )
    k[:, 0, :, 1:] = np.nan  # after slot 0's only key: masked, whatever its value
    placement = Placement(make_mesh(MeshConfig(**mesh)), "decode") if mesh else None
    scores = jnp.linspace(-3, 4, KV * G) if sinks else None

    def run(*arrays):
        return decode_attention(*arrays, None, jnp.int32(layer), placement, window, scores)

    out = jax.jit(run)(q, k, v, LENGTHS)
    expected = reference(q, k[layer], v[layer], LENGTHS, window, scores)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize(
    "mesh", [{}, {"fsdp": 2, "tensor": 2}], ids=["one device", "slots and heads over a mesh"]
)
@pytest.mark.parametrize("window", [0, 32, 45])
def test_pages_in_any_order_shared_and_missing(mesh, window):
    """Pages have 32 tokens, and slots 2 and 3 share their first two. Page-table entries past a
    slot's length are out of range and never read. Over the mesh, slots 0 and 1 use the first half
    of the pages and slots 2 and 3 the second half, both numbered from 0.
    """
    size, pages, per_slot, groups = 32, 40, 12, mesh.get("fsdp", 1)
    rng = np.random.default_rng(3)
    table, free = (
        np.full((B, per_slot), pages, np.int32),
        [list(rng.permutation(pages // groups)) for _ in range(groups)],
    )
    first = np.arange(B) * groups // B
    for i, n in enumerate(LENGTHS):
        for j in range(-(-n // size)):
            table[i, j] = table[2, j] if i == 3 and j < 2 else free[first[i]].pop()
    q, k, v = (
        draw(B, KV, G, D) / D**0.5,
        draw(LAYERS, pages, KV, size, D),
        draw(LAYERS, pages, KV, size, D)[::-1].copy(),
    )
    placement = Placement(make_mesh(MeshConfig(**mesh)), "decode") if mesh else None
    out = jax.jit(lambda *x: decode_attention(*x, jnp.int32(1), placement, window))(
        q, k, v, LENGTHS, table
    )
    rows = [
        x[1][np.minimum(table + first[:, None] * pages // groups, pages - 1)]
        .transpose(0, 2, 1, 3, 4)
        .reshape(B, KV, -1, D)
        for x in (k, v)
    ]
    np.testing.assert_allclose(out, reference(q, *rows, LENGTHS, window), atol=2e-6)


@pytest.mark.parametrize("window", [0, 1, 4096])
def test_lengths_before_at_and_after_the_end_of_a_large_block(window):
    """Rows of 8,192 positions are two blocks of 4,096."""
    lengths = np.array([4095, 4096, 4097, 8192])
    q, k, v = draw(B, 1, G, D) / D**0.5, draw(1, B, 1, 8192, D), draw(1, B, 1, 8192, D)[::-1].copy()
    assert block_tokens(8192, D * 4) == 4096
    out = jax.jit(lambda *x: decode_attention(*x, None, jnp.int32(0), None, window))(
        q, k, v, lengths
    )
    np.testing.assert_allclose(out, reference(q, k[0], v[0], lengths, window), atol=2e-6)


@pytest.mark.parametrize("window", [0, 130])
@pytest.mark.parametrize("lengths", [(0, 300, 0, 77), (300, 0, 0, 256), (0, 0, 0, 5), (0, 0, 0, 0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_slot_of_length_0_gives_0(lengths, window, sinks):
    """Its own keys have no number, which nothing may read."""
    lengths = np.array(lengths)
    q, k, v = draw(B, KV, G, D), draw(1, B, KV, 384, D), draw(1, B, KV, 384, D)[::-1].copy()
    k[:, lengths == 0], v[:, lengths == 0] = np.nan, np.nan
    scores = jnp.linspace(-3, 4, KV * G) if sinks else None
    out = jax.jit(lambda *x: decode_attention(*x, None, jnp.int32(0), None, window, scores))(
        q, k, v, lengths
    )
    live = lengths > 0
    assert not np.any(out[~live])
    expected = reference(q[live], k[0, live], v[0, live], lengths[live], window, scores)
    np.testing.assert_allclose(out[live], expected, atol=2e-5)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("lengths", "window", "fetched"),
    [
        ((300, 77, 256, 1), 0, 3 + 1 + 2 + 1),
        ((300, 0, 0, 1), 0, 3 + 1),
        ((0, 0, 300, 0), 0, 3),
        ((0, 300, 0, 128), 130, 2 + 1),
    ],
)
def test_the_blocks_that_are_fetched_are_those_of_live_slots(paged, lengths, window, fetched):
    """A block is fetched where its index is not that of the turn before."""
    lengths, table = jnp.array(lengths), jnp.arange(12).reshape(4, 3)
    where = _page if paged else _own_row
    slots = _read_slots(lengths)
    indices = [
        tuple(int(x) for x in where(128, window, i, j, lengths, table, jnp.zeros(1, int), slots))
        for i in range(4)
        for j in range(3)
    ]
    assert 1 + sum(a != b for a, b in itertools.pairwise(indices)) == fetched


@pytest.mark.parametrize(
    ("positions", "heads", "tokens"),
    [
        (32_768, 1, 4096),  # Qwen3-30B-A3B with its heads over 4 devices
        (32_768, 4, 2048),
        (32_768, 8, 1024),
        (6144, 1, 2048),
        (384, 1, 128),
        (128, 64, 128),
    ],
)
def test_blocks_are_as_large_as_fast_memory_and_the_rows_allow(positions, heads, tokens):
    """Keys are bfloat16 and heads have 128 channels."""
    assert block_tokens(positions, heads * 128 * 2) == tokens


def test_sizes_that_the_kernel_does_not_take_are_known():
    assert decode_fits(256, 128, False) and decode_fits(32, 128, True)
    assert (
        not decode_fits(200, 128, False)
        and not decode_fits(8, 128, True)
        and not decode_fits(256, 64, False)
    )
