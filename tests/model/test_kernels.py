"""The attention kernels (the TPU's in interpreter mode, cuDNN's replaced by XLA) against the
portable code, on one device and over a mesh.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.config import ComputeConfig, MeshConfig, ModelConfig
from compass_jax.devices.sharding import Placement, make_mesh
from compass_jax.model import kernels
from compass_jax.model.kernels import cudnn_causal, cudnn_fits, splash_causal, splash_fits
from compass_jax.model.params import to_decode
from compass_jax.model.transformer import Transformer, apply, init_cache, init_params

MODEL = ModelConfig(
    family="qwen3", vocab_size=32, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=128, ffn=16
)
T = 256


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", True)


def reference(q, k, v, segments=None, window=0):
    """Computes softmax(q k^T) v in float64 over the keys up to the query's position, and only those
    of its segment if segments are given.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    seen = np.tril(np.ones((1, q.shape[2], q.shape[2]), bool))
    if window:
        seen = seen & ~np.tril(seen, -window)
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h // (q.shape[1] // k.shape[1])].transpose(0, 2, 1)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, h] = weights / weights.sum(-1, keepdims=True) @ v[:, h // (q.shape[1] // k.shape[1])]
    return out


@pytest.mark.parametrize(
    "mesh",
    [{}, {"context": 2}, {"fsdp": 2, "tensor": 2}],
    ids=["one device", "context", "rows and heads"],
)
@pytest.mark.parametrize("window", [0, 1, 130])
def test_the_kernel_is_causal_attention(mesh, window):
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, heads, T, 128)), jnp.float32) for heads in (4, 2, 2)
    )
    q = q / 128**0.5
    placement = Placement(make_mesh(MeshConfig(**mesh))) if mesh else None
    out = jax.jit(lambda *x: splash_causal(*x, placement, window=window))(q, k, v)
    np.testing.assert_allclose(out, reference(q, k, v, window=window), atol=2e-6)


@pytest.mark.parametrize(
    "mesh", [{}, {"fsdp": 2, "tensor": 2}], ids=["one device", "rows and heads"]
)
@pytest.mark.parametrize("window", [0, 1, 30])
def test_cudnn_gets_causal_attention(mesh, window):
    """The Pallas kernel would not take a head of 24 channels and a row of 50 tokens."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, heads, 50, 24)), jnp.float32) for heads in (4, 2, 2)
    )
    placement = Placement(make_mesh(MeshConfig(**mesh))) if mesh else None
    out = jax.jit(lambda *x: cudnn_causal(*x, placement, window))(q / 24**0.5, k, v)
    np.testing.assert_allclose(out, reference(q / 24**0.5, k, v, window=window), atol=2e-6)


def test_what_cudnn_does_not_take_is_known(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", False)
    placement = Placement(make_mesh(MeshConfig(context=2)))
    half, wide = jnp.dtype("bfloat16"), jnp.dtype("float32")
    assert cudnn_fits(50, 24, half, None) and cudnn_fits(50, 128, jnp.dtype("float16"), None)
    assert not cudnn_fits(50, 24, wide, None) and not cudnn_fits(50, 20, half, None)
    assert not cudnn_fits(50, 136, half, None) and not cudnn_fits(64, 24, half, placement)


@pytest.mark.parametrize(
    "mesh", [{}, {"fsdp": 2, "tensor": 2}], ids=["one device", "rows and heads"]
)
@pytest.mark.parametrize("window", [0, 40])
def test_the_kernel_sees_a_segment_alone(mesh, window):
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, heads, T, 128)), jnp.float32) for heads in (4, 2, 2)
    )
    q = q / 128**0.5
    at = np.arange(T)
    segments = np.stack([1 + (at >= 90) + (at >= 91), np.where(at < 200, 1, 0)]).astype(np.int32)
    placement = Placement(make_mesh(MeshConfig(**mesh))) if mesh else None
    out = jax.jit(lambda *x: splash_causal(*x[:3], placement, x[3], window))(q, k, v, segments)
    np.testing.assert_allclose(out, reference(q, k, v, segments, window), atol=2e-6)


def test_lengths_that_the_kernel_does_not_take_are_known():
    placement = Placement(make_mesh(MeshConfig(context=2)))
    assert splash_fits(256, 128, None) and splash_fits(256, 128, placement)
    assert (
        not splash_fits(200, 128, None)
        and not splash_fits(256, 64, None)
        and not splash_fits(128, 128, placement)
    )


@pytest.mark.parametrize(
    "what",
    [
        "training",
        "prefill",
        "window",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("packed", "another length")),
    ],
)
@pytest.mark.parametrize("fast", ["splash", "cudnn"])
def test_a_model_with_the_kernel_is_the_model_without(what, fast):
    """Hidden states agree and, in training, gradients do. A length that the kernel does not support
    takes the portable code.
    """
    config = MODEL
    if what == "window":  # a window in the first layer only; sinks in both
        config = dataclasses.replace(
            MODEL, sliding_window=90, full_attention_layers=(1,), attention_sinks=True, init_std=0.2
        )
    params = init_params(config, ComputeConfig(), jax.random.key(0))
    t = 200 if what == "another length" else T
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 32, (2, t)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], tokens.shape)
    segments = (positions >= 70).astype(jnp.int32) if what == "packed" else None
    results = []
    for kernel in (fast, "portable"):
        compute = dataclasses.replace(ComputeConfig(), attention=kernel)
        layout = "decode" if what == "prefill" else "stacked"
        model, cache = (
            Transformer(config, compute, layout),
            init_cache(MODEL, 2, t, compute) if what == "prefill" else None,
        )

        def run(params, model=model, cache=cache):
            options = {"mask": positions < t, "cache": cache, "segments": segments}
            out = apply(model, params, tokens, positions, **options)
            return jnp.sum(jnp.sin(out.hidden)), (out.hidden, out.cache)

        if what == "prefill":
            results.append(jax.jit(run)(to_decode(params))[1])
        else:
            (_, (hidden, _)), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(params)
            results.append((hidden, grads))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.max(jnp.abs(b)))))


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "layers apart"])
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2, "context": 2}], ids=["one device", "mesh"])
def test_remat_keeps_the_output_of_attention(scan, mesh):
    """The backward pass recomputes the feed-forward layers, and keeps the kernel's output only with
    `remat_attention`. The gradient equals the one without remat.
    """
    tokens = jnp.arange(2 * T, dtype=jnp.int32).reshape(2, T) % MODEL.vocab_size
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (2, T))
    placement = Placement(make_mesh(MeshConfig(**mesh))) if mesh else None
    gradients = []
    for remat, attention in ((False, False), (True, False), (True, True)):
        compute = ComputeConfig(
            attention="splash", remat=remat, remat_attention=attention, scan_layers=scan
        )
        params = init_params(MODEL, compute, jax.random.key(0))

        model = Transformer(MODEL, compute, placement=placement)

        def loss(params, model=model):
            out = apply(model, params, tokens, positions, mask=jnp.ones(tokens.shape, bool))
            return jnp.sum(out.hidden**2)

        compiled = jax.jit(jax.value_and_grad(loss)).lower(params).compile()
        recomputed = [x for x in compiled.as_text().splitlines() if "rematted_computation" in x]
        assert bool(recomputed) == remat
        assert any("splash_mha_fwd" in x for x in recomputed) == attention
        assert "splash_mha_fwd" in compiled.as_text()
        gradients.append(jax.tree.leaves(compiled(params)))
    for first, *with_remat in zip(*gradients, strict=True):
        assert all(np.abs(x - first).max() <= 1e-4 * np.abs(first).max() for x in with_remat)
