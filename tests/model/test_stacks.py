"""Experts in the stack of all layers: the kernel against float64, and decoding with it."""

import dataclasses
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import EOS, make_prompt, random_params

from compass_jax.config import ComputeConfig, MeshConfig, ModelConfig, MoEConfig, RolloutConfig
from compass_jax.devices.sharding import Placement, make_mesh
from compass_jax.model.experts import build as experts
from compass_jax.model.experts.kernels import stacked_dot
from compass_jax.model.params import place
from compass_jax.model.quantize import Quantized, dequantize, quantize
from compass_jax.model.stacks import InStack
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose
from compass_jax.weights.sync import sync_weights

NO_TOKAMAX = find_spec("tokamax") is None
MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=40,
    hidden=32,
    layers=4,
    heads=4,
    kv_heads=4,
    head_dim=8,
    ffn=32,
    rope_theta=100.0,
    moe=MoEConfig(experts=8, top_k=2, ffn=16, sparse_step=2),
)
ROLLOUT = RolloutConfig(
    slots=4, prompt_buckets=(8,), max_new_tokens=6, tokens_per_call=4, cache_bucket=16
)
PROMPTS = [make_prompt(i, n) for i, n in enumerate((3, 8, 5))]


@pytest.mark.skipif(NO_TOKAMAX, reason="tokamax needs Python 3.12")
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "e4m3"])
@pytest.mark.parametrize("layer", [0, 2])
def test_the_kernel_multiplies_rows_by_one_layers_experts(monkeypatch, kind, layer):
    """The reference is float64 on the dequantised weights. One expert has no rows, and rows without
    an expert are undefined.
    """
    from interpreted import on_a_tpu

    rng, (layers, e, m, i, o) = np.random.default_rng(0), (3, 8, 256, 256, 384)
    x = jnp.asarray(rng.standard_normal((m, i)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((layers, e, i, o)), jnp.bfloat16)
    sizes = np.array([20, 0, 60, 33, 0, 100, 5, 10])
    stack = w if kind == "bfloat16" else quantize(w.astype(jnp.float32), kind)
    with on_a_tpu(monkeypatch):
        got = stacked_dot(
            x, InStack(stack, jnp.int32(layer)), jnp.asarray(sizes, jnp.int32), jnp.dtype("float32")
        )
    exact = dequantize(stack, "float32") if isinstance(stack, Quantized) else stack
    matrices = np.repeat(np.asarray(exact[layer], np.float64), sizes, axis=0)
    rows = np.asarray(x, np.float64)[: sizes.sum()]
    expected = np.einsum("mi,mio->mo", rows, matrices)
    error = np.abs(np.asarray(got, np.float64)[: sizes.sum()] - expected).max()
    assert error < 1e-5 * np.abs(expected).max() and expected.std() > 1


def sampled(mesh, quantized, logprob_chunk):
    """Returns rollouts by row and their routes, on a mesh. A new `logprob_chunk` forces a new
    compilation.
    """
    compute = ComputeConfig(experts="ragged", scan_decode=True, logprob_chunk=logprob_chunk)
    placement = Placement(make_mesh(MeshConfig(**mesh)), "decode") if mesh else None
    params = random_params(MODEL)
    weights = sync_weights(
        place(params, MODEL, placement) if placement else params,
        MODEL,
        "float32",
        quantized,
        stored=True,
        placement=placement,
        layout="decode_stacked",
    )[0]
    rollout = dataclasses.replace(ROLLOUT, quantize=quantized)
    engine = Engine(MODEL, compute, rollout, EOS, placement)
    job = Collection(engine, weights, PROMPTS, 2, Purpose.TRAIN, 0)
    return {one.row: one for one in job}, np.asarray(job.routes)


@pytest.mark.parametrize("quantized", ["off", "int8"])
@pytest.mark.parametrize("mesh", [{}, {"expert": 2, "tensor": 2}], ids=["one device", "four"])
def test_decoding_from_stacks_samples_what_slices_do(monkeypatch, mesh, quantized):
    """The model has a dense and an MoE layer, twice. Its matrices are too narrow for the kernel, so
    that `stacked_dot` slices out the layer.
    """
    expected, routes = sampled(mesh, quantized, 512)
    calls = []

    def counted(x, w, *args, **options):
        calls.append(isinstance(w, InStack))
        return stacked_dot(x, w, *args, **options)

    monkeypatch.setattr(experts, "_has_stack_kernel", lambda *_: True)
    monkeypatch.setattr(experts, "stacked_dot", counted)
    actual, actual_routes = sampled(mesh, quantized, 640)
    assert all(calls) and len(calls) >= 4  # two products, in prefill and decoding
    np.testing.assert_array_equal(actual_routes, routes)
    assert sorted(actual) == sorted(expected) == list(range(6))
    for row, one in actual.items():
        np.testing.assert_array_equal(one.tokens, expected[row].tokens)
        np.testing.assert_allclose(one.logp, expected[row].logp, atol=1e-6)


def test_a_plain_matrix_takes_ragged_dot():
    x, w, sizes = jnp.ones((6, 4)), jnp.arange(24.0).reshape(2, 4, 3), jnp.array([2, 4], jnp.int32)
    plain = partial(jax.lax.ragged_dot, x, w, sizes)
    np.testing.assert_array_equal(stacked_dot(x, w, sizes), plain())
