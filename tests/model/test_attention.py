"""Norm, rotary positions and attention against float64 numpy implementations of their definitions,
and attention with the cache against attention without.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.config import MeshConfig, ModelConfig
from compass_jax.devices.sharding import Placement, make_mesh
from compass_jax.model.attention import LayerCache, attention, rms_norm
from compass_jax.model.rope import apply_rope, rope_tables

HEADS, KV, HEAD, HIDDEN = 4, 2, 6, 10


def numpy_norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def numpy_rope(x, positions, theta):
    """Rotates each pair (i, i + d/2) of a head, as a complex number, by positions *
    theta^(-2i/d).
    """
    d = x.shape[-1]
    turn = np.exp(1j * positions[..., None, None] * theta ** (-np.arange(0, d, 2) / d))
    z = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def numpy_attention(x, p, positions, config, window=0):
    """Computes attention one head of one row at a time. A token sees itself and the tokens before
    it in its row, at most `window` of them.
    """
    b, t, _ = x.shape

    def project(name, heads):
        return (x @ p[name] + p.get(f"{name}_bias", 0.0)).reshape(b, t, heads, config.head_dim)

    q, k, v = (
        project("q", config.heads),
        project("k", config.kv_heads),
        project("v", config.kv_heads),
    )
    if config.qk_norm:
        q, k = (
            numpy_norm(q, p["q_norm"], config.norm_eps),
            numpy_norm(k, p["k_norm"], config.norm_eps),
        )
    q, k = numpy_rope(q, positions, config.rope_theta), numpy_rope(k, positions, config.rope_theta)
    out = np.zeros((b, t, config.heads, config.head_dim))
    for row, h, i in np.ndindex(b, config.heads, t):
        shared = h // (config.heads // config.kv_heads)
        seen = slice(max(0, i + 1 - window) if window else 0, i + 1)
        scores = k[row, seen, shared] @ q[row, i, h] / np.sqrt(config.head_dim)
        weights, sink = np.exp(scores - scores.max()), 0.0
        if "sinks" in p:
            sink = np.exp(p["sinks"][h] - scores.max())
        out[row, i, h] = weights / (weights.sum() + sink) @ v[row, seen, shared]
    return out.reshape(b, t, -1) @ p["o"] + p.get("o_bias", 0.0)


def make(qk_norm=True, bias=True, seed=0, sinks=False):
    rng = np.random.default_rng(seed)
    config = ModelConfig(
        family="qwen3",
        vocab_size=3,
        hidden=HIDDEN,
        layers=1,
        heads=HEADS,
        kv_heads=KV,
        head_dim=HEAD,
        ffn=1,
        rope_theta=100.0,
        qk_norm=qk_norm,
        qkv_bias=bias,
        o_bias=bias,
        norm_eps=1e-3,
    )
    p = {
        "q": (HIDDEN, HEADS * HEAD),
        "k": (HIDDEN, KV * HEAD),
        "v": (HIDDEN, KV * HEAD),
        "o": (HEADS * HEAD, HIDDEN),
    }
    if bias:
        p |= {
            "q_bias": (HEADS * HEAD,),
            "k_bias": (KV * HEAD,),
            "v_bias": (KV * HEAD,),
            "o_bias": (HIDDEN,),
        }
    if qk_norm:
        p |= {"q_norm": (HEAD,), "k_norm": (HEAD,)}
    if sinks:
        p |= {"sinks": (HEADS,)}
    return (
        config,
        {name: rng.standard_normal(shape) for name, shape in p.items()},
        rng.standard_normal((2, 7, HIDDEN)),
    )


def run(x, p, positions, config, dtype, cache=None, **options):
    positions = jnp.asarray(positions, jnp.int32)
    tables = rope_tables(positions, HEAD, config.rope_theta, dtype)
    return attention(
        jnp.asarray(x, dtype),
        jax.tree.map(lambda w: jnp.asarray(w, dtype), p),
        tables,
        positions,
        config,
        cache,
        **options,
    )


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 4, 8)])
def test_norm_against_numpy(x64, shape):
    rng = np.random.default_rng(0)
    x, scale = 1e-2 * rng.standard_normal(shape), rng.standard_normal(8)
    np.testing.assert_allclose(
        rms_norm(jnp.asarray(x), jnp.asarray(scale), 1e-4), numpy_norm(x, scale, 1e-4), rtol=1e-13
    )
    half = rms_norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale, jnp.bfloat16), 1e-4)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(half, np.float64), numpy_norm(x, scale, 1e-4), rtol=0.02, atol=1e-3
    )


def test_rotary_positions_against_numpy(x64):
    rng = np.random.default_rng(0)
    x, positions = rng.standard_normal((2, 3, 4, 8)), np.array([[0, 1, 900], [5, 6, 30_000]])
    tables = rope_tables(jnp.asarray(positions, jnp.int32), 8, 1e4, jnp.float64)
    np.testing.assert_allclose(
        apply_rope(jnp.asarray(x), tables), numpy_rope(x, positions, 1e4), atol=1e-10
    )


def test_float32_angles_stay_exact_at_far_positions():
    """A bfloat16 model at position 30,000 computes the angle in float32 and rounds only
    the table.
    """
    positions = np.array([[30_000]])
    cos, sin = rope_tables(jnp.asarray(positions, jnp.int32), 8, 1e6, jnp.bfloat16)
    angle = 30_000 * 1e6 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(np.asarray(cos, np.float64)[0, 0, 0, :4], np.cos(angle), atol=0.01)
    np.testing.assert_allclose(np.asarray(sin, np.float64)[0, 0, 0, 4:], np.sin(angle), atol=0.01)


@pytest.mark.parametrize(("qk_norm", "bias"), [(True, False), (True, True), (False, True)])
def test_attention_against_numpy(x64, qk_norm, bias):
    config, p, x = make(qk_norm, bias)
    positions = np.array([range(7), range(40, 47)])
    out, cache = run(x, p, positions, config, jnp.float64)
    assert cache is None
    np.testing.assert_allclose(out, numpy_attention(x, p, positions, config), atol=1e-12)


@pytest.mark.parametrize("window", [0, 20])
def test_segments_of_a_row_attend_as_rows_of_their_own_do(x64, window):
    """The rows are longer than one chunk of attention, and a segment may span several chunks."""
    config, p, _ = make()
    x = np.random.default_rng(1).standard_normal((2, 90, HIDDEN))
    sizes = ((40, 1, 49), (3, 60, 27))
    segments = np.stack([np.repeat(np.arange(3), one) for one in sizes]).astype(np.int32)
    positions = np.stack([np.concatenate([np.arange(n) for n in one]) for one in sizes])
    options = {"segments": jnp.asarray(segments), "window": window}
    out, _ = run(x, p, positions, config, jnp.float64, **options)
    for row, one in enumerate(sizes):
        for first, last in zip(np.cumsum((0, *one)), np.cumsum(one), strict=False):
            alone = x[row : row + 1, first:last]
            at = positions[row : row + 1, first:last]
            expected = numpy_attention(alone, p, at, config, window)
            np.testing.assert_allclose(out[row, first:last], expected[0], atol=1e-12)


def test_the_future_is_not_seen():
    config, p, x = make()
    positions = np.broadcast_to(np.arange(7), (2, 7))
    later = x.copy()
    later[:, 4:] = 1e4
    out, changed = (run(value, p, positions, config, jnp.float32)[0] for value in (x, later))
    np.testing.assert_array_equal(out[:, :4], changed[:, :4])


@pytest.mark.parametrize(
    ("window", "sinks"), [(1, False), (5, False), (40, True), (90, False), (200, False), (0, True)]
)
def test_a_token_sees_its_window_in_chunks_and_in_one_piece(x64, window, sinks):
    """Queries run in several chunks on one device, and in one piece where a mesh splits them."""
    config, p, _ = make(sinks=sinks)
    x = np.random.default_rng(1).standard_normal((2, 90, HIDDEN))
    positions = np.broadcast_to(np.arange(90), (2, 90))
    expected = numpy_attention(x, p, positions, config, window)
    out, _ = run(x, p, positions, config, jnp.float64, window=window)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    placement = Placement(make_mesh(MeshConfig(context=2)))
    split, _ = run(x, p, positions, config, jnp.float64, placement=placement, window=window)
    np.testing.assert_allclose(split, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("size", "window", "sinks"), [(12, 0, False), (8, 0, False), (12, 2, False), (12, 2, True)]
)
def test_rows_at_their_own_positions_through_the_cache(x64, size, window, sinks):
    """Row 0 has 3 tokens in the cache and row 1 has 5; the rest are decoded one at a time. The
    cache is filled with stale values, as in a slot that another request used.
    """
    config, p, x = make(sinks=sinks)
    positions = np.broadcast_to(np.arange(7), (2, 7))
    expected = numpy_attention(x, p, positions, config, window)
    dirty = jnp.full((2, KV, size, HEAD), 7.0)
    # positions past the cache are dropped
    first = np.where(np.arange(5) < np.array([[3], [5]]), np.arange(5), 99)
    out, cache = run(
        x[:, :5], p, first, config, jnp.float64, LayerCache(dirty, dirty), window=window
    )
    np.testing.assert_allclose(out[0, :3], expected[0, :3], atol=1e-12)
    np.testing.assert_allclose(out[1, :5], expected[1, :5], atol=1e-12)
    np.testing.assert_array_equal(cache.k[0, :, 3:], 7.0)
    for step in range(2):
        at = np.array([[3 + step], [5 + step]])
        token = np.take_along_axis(x, at[..., None], axis=1)
        out, cache = run(token, p, at, config, jnp.float64, cache, window=window)
        np.testing.assert_allclose(out[:, 0], expected[[0, 1], at[:, 0]], atol=1e-12)
