"""Masked statistics compared with numpy on the selected values, with empty selections and NaN
outside the mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.base import masked

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 9))
MASK = RNG.random((5, 9)) < 0.6
MASK[2] = False
STATISTICS = {"sum": np.sum, "mean": np.mean, "max": np.max}


def of(name, x, mask, **kwargs):
    function = functools.partial(getattr(masked, f"masked_{name}"), **kwargs)
    return jax.jit(function)(jnp.asarray(x), jnp.asarray(mask))


@pytest.mark.parametrize("name", STATISTICS)
def test_per_row_and_overall(name, x64):
    dirty = np.where(MASK, X, np.nan)
    expected = [
        STATISTICS[name](row[m]) if m.any() else 0.0 for row, m in zip(X, MASK, strict=True)
    ]
    np.testing.assert_allclose(of(name, dirty, MASK, axis=1), expected, rtol=1e-12)
    np.testing.assert_allclose(
        of(name, dirty, MASK, axis=1, keepdims=True)[:, 0], expected, rtol=1e-12
    )
    np.testing.assert_allclose(of(name, dirty, MASK), STATISTICS[name](X[MASK]), rtol=1e-12)
    assert of(name, dirty, np.zeros_like(MASK)) == 0


@pytest.mark.parametrize("name", STATISTICS)
def test_gradient_is_finite_and_zero_outside_the_mask(name, x64):
    constant = np.where(MASK, 1.5, np.nan)
    constant[0] = np.where(MASK[0], X[0], np.inf)
    grad = np.asarray(jax.grad(lambda x: of(name, x, MASK, axis=1).sum())(jnp.asarray(constant)))
    assert np.all(np.isfinite(grad)) and np.all(grad[~MASK] == 0)
    n = MASK.sum(1)
    # Adding c to a row adds c times this number to its statistic.
    sums = {"sum": n, "mean": n > 0, "std": 0 * n, "max": n > 0, "min": n > 0}[name]
    np.testing.assert_allclose(grad.sum(1), sums, atol=1e-12)


@pytest.mark.parametrize("q", [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.8, 0.95, 0.999, 1.0])
def test_quantile_is_numpys(q, x64):
    got = jax.jit(masked.masked_quantile, static_argnums=2)(
        jnp.asarray(np.where(MASK, X, np.nan)), jnp.asarray(MASK), q
    )
    expected = [
        np.quantile(row[m], q, method="linear") if m.any() else 0.0
        for row, m in zip(X, MASK, strict=True)
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)


def test_quantile_falls_exactly_on_a_value_in_float32():
    """0.8 (n - 1) is an integer for these n; in float32 arithmetic it would be off by up to 1e-3 of
    a position.
    """
    for n in (6, 30_001):
        values = jnp.asarray(RNG.exponential(size=(1, n)), jnp.float32)
        expected = np.sort(np.asarray(values)[0])[4 * (n - 1) // 5]
        assert masked.masked_quantile(values, jnp.ones((1, n), bool), 0.8)[0] == expected


def test_quantile_outside_the_unit_interval_is_refused():
    with pytest.raises(ValueError, match=r"q = 1.5 is outside \[0, 1\]"):
        masked.masked_quantile(jnp.ones((1, 2)), jnp.ones((1, 2), bool), 1.5)
