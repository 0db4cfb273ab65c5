"""compute.float32_parts: the effect of each part, the agreement with float32 when all parts are
set, and the agreement between cache and training.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import COMPUTE, MODEL, random_params

from compass_jax.model.params import to_decode
from compass_jax.model.transformer import Transformer, apply, init_cache

PARTS = ("attention", "gate", "mlp", "stream")
HALF = jax.tree.map(lambda x: x.astype("bfloat16"), random_params())
TOKENS = jnp.asarray(np.random.default_rng(1).integers(2, MODEL.vocab_size, (160, 20)), jnp.int32)
MASK = jnp.ones(TOKENS.shape, bool)
POSITIONS = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32)[None], TOKENS.shape)
_apply = jax.jit(apply, static_argnums=0)


def run(parts, params=HALF, routes=None, dtype="bfloat16", config=MODEL):
    model = Transformer(config, dataclasses.replace(COMPUTE, dtype=dtype, float32_parts=parts))
    return _apply(model, params, TOKENS, POSITIONS, mask=MASK, routes=routes)


EXACT = run((), dtype="float32")  # float32 compute on the same rounded weights


def test_all_parts_leave_nothing_but_the_weights_rounding():
    out = run(PARTS)
    assert out.hidden.dtype == jnp.float32
    np.testing.assert_array_equal(out.routes, EXACT.routes)
    np.testing.assert_allclose(out.hidden, EXACT.hidden, rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(run(()).hidden, np.float32) - EXACT.hidden).max() > 1e-2


@pytest.mark.parametrize(
    "part", [PARTS[0], *(pytest.param(x, marks=pytest.mark.slow) for x in PARTS[1:])]
)
def test_each_part_is_a_source_of_error_of_its_own(part):
    """A model with only this part in bfloat16 differs from float32 on the same routes, but by less
    than a model with all parts in bfloat16.
    """
    other_parts = tuple(p for p in PARTS if p != part)
    alone, all_bfloat16 = (
        np.asarray(run(parts, routes=EXACT.routes).hidden, np.float32)
        for parts in (other_parts, ())
    )
    error = np.abs(alone - EXACT.hidden).mean()
    assert 1e-5 < error < np.abs(all_bfloat16 - EXACT.hidden).mean()


def test_the_gate_in_float32_chooses_as_a_float32_model_does_from_the_same_stream():
    """The first MoE layer sees an unrounded stream: with the gate in float32 its choices are those
    of the float32 model, and in bfloat16 some of them flip.
    """
    with_gate = run(("attention", "stream", "gate")).routes[:, :, 0]
    without = run(("attention", "stream")).routes[:, :, 0]
    np.testing.assert_array_equal(with_gate, EXACT.routes[:, :, 0])
    flipped = np.any(np.sort(without, -1) != np.sort(EXACT.routes[:, :, 0], -1), axis=-1).mean()
    assert 0 < flipped < 0.1


@pytest.mark.parametrize(
    "parts",
    [
        ("attention",),
        *(pytest.param(x, marks=pytest.mark.slow) for x in (("gate", "stream"), PARTS)),
    ],
)
def test_decoding_with_a_cache_has_the_same_parts(parts):
    compute = dataclasses.replace(COMPUTE, dtype="bfloat16", float32_parts=parts)
    cache = init_cache(MODEL, 160, 20, compute)
    assert cache[0].k.dtype == (jnp.float32 if "attention" in parts else jnp.bfloat16)
    loose = Transformer(MODEL, compute, "decode")
    out = _apply(
        loose, to_decode(HALF), TOKENS, POSITIONS, mask=MASK, cache=cache, routes=EXACT.routes
    )
    assert out.hidden.dtype == (jnp.float32 if "stream" in parts else jnp.bfloat16)
    stacked = run(parts, routes=EXACT.routes)
    np.testing.assert_allclose(
        *(np.asarray(x.hidden, np.float32) for x in (out, stacked)),
        atol=1e-4 if parts == PARTS else 0.1,
    )


def test_a_dense_layer_belongs_to_mlp():
    dense = dataclasses.replace(MODEL, family="qwen3", moe=None, layers=2)
    params = jax.tree.map(lambda x: x.astype("bfloat16"), random_params(dense))
    exact = run((), params, dtype="float32", config=dense).hidden
    np.testing.assert_allclose(
        run(("attention", "mlp", "stream"), params, config=dense).hidden,
        exact,
        rtol=1e-5,
        atol=1e-5,
    )
    assert (
        np.abs(np.asarray(run(("attention", "stream"), params, config=dense).hidden) - exact).max()
        > 1e-4
    )


def test_without_bfloat16_the_parts_change_nothing():
    assert (
        dataclasses.replace(COMPUTE, dtype="float64", float32_parts=PARTS).dtype_of("mlp")
        == "float64"
    )
    assert dataclasses.replace(COMPUTE, float32_parts=PARTS).dtype_of("gate") == "float32"
    compute = dataclasses.replace(COMPUTE, dtype="bfloat16", float32_parts=("gate",))
    assert [compute.dtype_of(part) for part in PARTS] == [
        "bfloat16",
        "float32",
        "bfloat16",
        "bfloat16",
    ]
