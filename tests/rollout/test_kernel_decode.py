"""Rollouts whose decoding reads keys with the kernel in interpreter mode: rows and pages, unrolled
and in a scan, and preempted. Their tokens are those of the portable code.
"""

import dataclasses

import jax
import numpy as np
import pytest
from tiny import COMPUTE, EOS, MODEL, ROLLOUT, make_prompt, random_params

from compass_jax.config import MeshConfig
from compass_jax.devices.sharding import Placement, make_mesh
from compass_jax.model import decode_kernel, kernels
from compass_jax.model.params import place, to_decode
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose
from compass_jax.weights.sync import sync_weights

WIDE = dataclasses.replace(MODEL, head_dim=128)
PARAMS = random_params(WIDE)
PROMPTS = [make_prompt(i, 3 + i) for i in range(4)]
ROLL = dataclasses.replace(
    ROLLOUT, slots=4, max_new_tokens=120, prompt_buckets=(8,), cache_bucket=128, page_tokens=16
)
HOW = {
    "rows": ({}, {}),
    "rows in a scan": ({}, {"scan_decode": True}),
    "rows over a mesh": ({"slots": 8}, {}),
    "pages": ({"cache_pages": 32}, {}),
    "pages in a scan, few": ({"cache_pages": 8, "slots": 8}, {"scan_decode": True}),
    "pages over a mesh": ({"cache_pages": 16, "slots": 8}, {}),
}


def roll(compute, rollout, mesh=None):
    placement = None if mesh is None else Placement(make_mesh(MeshConfig(**mesh)), "decode")
    engine = Engine(WIDE, compute, dataclasses.replace(ROLL, **rollout), EOS, placement)
    if placement is None:
        params = to_decode(PARAMS, layout=engine.layout)
    else:
        params = sync_weights(
            place(PARAMS, WIDE, placement),
            WIDE,
            "float32",
            layout=engine.layout,
            placement=placement,
        )[0]
    job = Collection(engine, params, PROMPTS, 2, Purpose.TRAIN, 0)
    return {r.row: r for r in job}, np.asarray(job.routes), job.stats


@pytest.fixture(scope="module")
def portable():
    return roll(COMPUTE, {})[:2]


@pytest.mark.parametrize(
    "name",
    [x if x in ("rows", "pages") else pytest.param(x, marks=pytest.mark.slow) for x in HOW],
)
def test_the_kernel_gives_the_same_rollout(portable, monkeypatch, name):
    rollout, compute = HOW[name]
    called, real = [], decode_kernel._decode
    monkeypatch.setattr(kernels, "INTERPRET", True)
    monkeypatch.setattr(
        decode_kernel, "_decode", lambda *a, **k: called.append(a[4] is not None) or real(*a, **k)
    )
    mesh = {"fsdp": 2, "tensor": 2} if "mesh" in name else None
    actual, store, stats = roll(
        dataclasses.replace(COMPUTE, attention="splash", **compute), rollout, mesh
    )
    expected, routes = portable
    assert called and all(paged == ("cache_pages" in rollout) for paged in called)
    assert (stats.preempted > 0) == ("few" in name)
    for row, plain in expected.items():
        np.testing.assert_array_equal(actual[row].tokens, plain.tokens)
        np.testing.assert_allclose(actual[row].logp, plain.logp, atol=1e-5)
    np.testing.assert_array_equal(store, routes)
    assert jax.device_count() == 8 and max(len(r.tokens) for r in expected.values()) > 60


def test_only_live_slots_read_keys(monkeypatch):
    """One read of a slot is one token that was drawn after the first, in each layer."""
    seen, real = [], decode_kernel._decode

    def watched(q, k, v, lengths, *rest, **sizes):
        jax.debug.callback(lambda x: seen.append(np.count_nonzero(x)), lengths)
        return real(q, k, v, lengths, *rest, **sizes)

    monkeypatch.setattr(kernels, "INTERPRET", True)
    monkeypatch.setattr(decode_kernel, "_decode", watched)
    # shapes that no other test compiled: the programs of those do not call `watched`
    samples = roll(dataclasses.replace(COMPUTE, attention="splash"), {"slots": 3})[0]
    jax.effects_barrier()
    drawn = sum(len(x.tokens) - len(x.prompt.tokens) - 1 for x in samples.values())
    assert sum(seen) == WIDE.layers * drawn < 3 * len(seen)
