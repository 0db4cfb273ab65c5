"""8-bit weights: values and scales against a float64 reference that searches all values of the
type, error bounds, and channels with extreme entries.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.model.params import ParamSpec
from compass_jax.model.quantize import dequantize, emulate, kind_for, quantize

# e4m3: 4 bits of exponent (bias 7), 3 of mantissa; exponent 0 is subnormal, the pattern 15/7 is NaN
# and not a value
E4M3 = sorted(
    {
        (m / 8 + (e > 0)) * 2.0 ** (max(e, 1) - 7)
        for e in range(16)
        for m in range(8)
        if (e, m) != (15, 7)
    }
)
GRIDS = {
    "e4m3": np.array(sorted({s * x for x in E4M3 for s in (-1, 1)})),
    "int8": np.arange(-127.0, 128.0),
}
KINDS = list(GRIDS)


def reference(w, kind):
    """Returns (dequantised values, scales, half the distance to the neighbour for each entry), by
    search in float64.
    """
    grid = GRIDS[kind]
    scales = np.maximum(np.abs(w.astype(np.float64)).max(axis=-2, keepdims=True), 1e-30) / grid[-1]
    scaled = w.astype(np.float64) / scales
    at = np.abs(scaled[..., None] - grid).argmin(-1)
    gaps = np.diff(grid)
    half = (
        np.maximum(gaps[np.clip(at, 0, len(gaps) - 1)], gaps[np.clip(at - 1, 0, len(gaps) - 1)]) / 2
    )
    return grid[at] * scales, scales, half * scales


def weights(seed=0, shape=(3, 40, 17), outliers=True):
    """Returns [experts, inputs, outputs] weights with a channel that has one huge entry, a channel
    of zeros, a tiny channel and a huge one.
    """
    w = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if outliers:
        w[0, 3, 2] = 1e4
        w[1, :, 5] = 0.0
        w[2, :, 7] *= 1e-20
        w[0, :, 9] *= 1e30
    return w


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_scales_are_those_of_the_reference(kind):
    w = weights()
    q = quantize(jnp.asarray(w), kind)
    expected, scales, _ = reference(w, kind)
    assert q.values.dtype == (
        jnp.float8_e4m3fn if kind == "e4m3" else jnp.int8
    ) and q.scales.shape == (3, 1, 17)
    np.testing.assert_allclose(q.scales, scales, rtol=1e-6)
    got = np.asarray(dequantize(q, "float32"), np.float64)
    agree = np.abs(got - expected) <= 1e-6 * np.abs(expected)
    # in the rest, float32 division moves an entry across the midpoint between two values
    assert agree.mean() > 0.999
    assert len(np.unique(np.asarray(q.values, np.float32))) > 100


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_error_is_at_most_half_a_step_and_the_largest_entry_is_exact(kind, seed):
    w = weights(seed)
    got = np.asarray(dequantize(quantize(jnp.asarray(w), kind), "float32"), np.float64)
    half = reference(w, kind)[2]
    assert np.all(np.abs(got - w) <= half * (1 + 1e-5) + 1e-6 * np.abs(w))
    peak = np.abs(w).argmax(axis=-2)[:, None]
    np.testing.assert_allclose(
        np.take_along_axis(got, peak, -2), np.take_along_axis(w, peak, -2), rtol=1e-6
    )
    assert np.mean(got != w) > 0.8  # most entries are rounded


@pytest.mark.parametrize("kind", KINDS)
def test_no_finite_matrix_gives_nan(kind):
    for w in (
        np.zeros((4, 3), np.float32),
        np.full((4, 3), 3e38, np.float32),
        np.full((4, 3), -1e-38, np.float32),
        weights(),
    ):
        q = quantize(jnp.asarray(w), kind)
        got = np.asarray(dequantize(q, "float32"))
        assert np.all(np.isfinite(got)) and np.all(np.asarray(q.scales) > 0)
        np.testing.assert_array_equal(got[w == 0], 0.0)


def test_the_largest_entry_of_a_channel_becomes_the_largest_value():
    """An entry divided by its scale may exceed 448 by a rounding error, and e4m3 has no infinity:
    casting a larger number gives NaN.
    """
    assert np.isnan(np.float32(jnp.float32(500.0).astype(jnp.float8_e4m3fn)))
    # every entry is its channel's largest
    w = jnp.asarray(np.random.default_rng(3).uniform(1, 2, (1, 20_000)), jnp.float32)
    np.testing.assert_array_equal(np.asarray(quantize(w, "e4m3").values, np.float32), 448.0)
    np.testing.assert_array_equal(np.asarray(quantize(-w, "int8").values, np.float32), -127.0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_costs_its_own_channel_and_expert_only(kind):
    w = weights(outliers=False)
    spoiled = w.copy()
    spoiled[1, 4, 6] = 1e5
    a, b = (np.asarray(dequantize(quantize(jnp.asarray(x), kind), "float32")) for x in (w, spoiled))
    changed = np.any(a != b, axis=-2)
    assert changed[1, 6] and changed.sum() == 1


def test_an_unknown_type_is_an_error():
    with pytest.raises(KeyError, match="e5m2"):
        quantize(jnp.ones((2, 2)), "e5m2")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_keeps_router_norms_biases_embedding_and_head(kind, dtype):
    rng = np.random.default_rng(0)
    unquantised = ("router", "attention_norm", "q_norm", "q_bias", "embed", "head", "final_norm")
    rounded = ("q", "k", "v", "o", "gate", "up", "down", "gate_up")
    tree = {
        "layer": {
            name: jnp.asarray(rng.standard_normal((8, 6)), jnp.float32)
            for name in unquantised + rounded
        }
    }
    layer = {
        name: ParamSpec(name, (8, 6), (None, None), quantised=name in rounded)
        for name in unquantised + rounded
    }
    out = jax.jit(lambda tree: emulate(tree, {"layer": layer}, kind, dtype))(tree)["layer"]
    plain = emulate(tree, {"layer": layer}, "off", dtype)["layer"]
    for name in unquantised:
        np.testing.assert_array_equal(out[name], tree["layer"][name].astype(dtype))
    for name in rounded:
        expected = reference(np.asarray(tree["layer"][name]), kind)[0]
        np.testing.assert_allclose(
            np.asarray(out[name], np.float64), expected, rtol=1e-6 if dtype == "float32" else 2**-8
        )
        assert np.mean(np.asarray(out[name]) != np.asarray(plain[name])) > 0.5
    assert {x.dtype for x in out.values()} == {jnp.dtype(dtype)}


@pytest.mark.parametrize(
    ("chip", "kind"),
    [
        ("TPU7x", "e4m3"),
        ("TPU v7", "e4m3"),
        ("TPU v6 lite", "int8"),
        ("TPU v5p", "int8"),
        ("TPU v5 lite", "int8"),
        ("TPU v4", "off"),
        ("NVIDIA H100 80GB HBM3", "e4m3"),
        ("NVIDIA H200", "e4m3"),
        ("NVIDIA L4", "e4m3"),
        ("NVIDIA H800", "e4m3"),
        ("NVIDIA GB300", "e4m3"),
        ("NVIDIA GeForce RTX 4090", "e4m3"),
        ("NVIDIA RTX 6000 Ada Generation", "e4m3"),
        ("NVIDIA A100-SXM4-80GB", "int8"),
        ("Tesla V100-SXM2-16GB", "off"),
        ("NVIDIA GeForce GTX 1650", "off"),
        ("cpu", "off"),
        ("", "off"),
    ],
)
def test_auto_takes_what_the_chip_multiplies_fast(chip, kind):
    assert kind_for(chip) == kind
