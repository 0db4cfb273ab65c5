"""ESPO's split of a response's tokens by entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compass_jax.rl.objectives import espo

entropy_groups = jax.jit(espo.entropy_groups, static_argnums=2)


def test_the_upper_fifth_is_one_group():
    entropy = np.arange(10, dtype=np.float32)[::-1].copy()
    groups = entropy_groups(jnp.asarray([entropy]), jnp.ones((1, 10), bool), (0.8,))
    np.testing.assert_array_equal(groups, [[1, 1, 0, 0, 0, 0, 0, 0, 0, 0]])  # threshold 7.2


def test_a_threshold_that_falls_on_a_token_includes_it():
    for n in (6, 11, 26):  # 0.8 * (n - 1) is a whole number
        groups = entropy_groups(jnp.linspace(0.1, 2.3, n)[None], jnp.ones((1, n), bool), (0.8,))
        assert int(groups.sum()) == n - 1 - 4 * (n - 1) // 5 + 1


def test_ties_and_single_tokens_are_high_and_outside_is_minus_one():
    entropy = jnp.asarray([[0.5, 0.5, 0.5, 9.0], [1.0, jnp.nan, jnp.nan, jnp.nan], [jnp.nan] * 4])
    mask = jnp.asarray([[True, True, True, False], [True, False, False, False], [False] * 4])
    np.testing.assert_array_equal(
        entropy_groups(entropy, mask, (0.5, 0.8)), [[2, 2, 2, -1], [2, -1, -1, -1], [-1] * 4]
    )
    np.testing.assert_array_equal(
        entropy_groups(entropy, mask, ()), [[0, 0, 0, -1], [0, -1, -1, -1], [-1] * 4]
    )


@pytest.mark.parametrize("quantiles", [(0.8,), (0.25, 0.75), (0.1, 0.5, 0.9)])
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**16))
def test_groups_are_those_of_numpy_quantiles(quantiles, seed):
    rng = np.random.default_rng(seed)
    entropy = rng.exponential(size=(4, 17))
    mask = rng.random((4, 17)) < rng.random((4, 1))
    with jax.enable_x64(True):
        got = np.asarray(entropy_groups(jnp.asarray(entropy), jnp.asarray(mask), quantiles))
    for i in range(4):
        values = entropy[i, mask[i]]
        if len(values):
            # 1e-12 below the threshold, so that rounding does not decide about a token that lies
            # exactly there
            thresholds = (
                np.array([np.quantile(values, q, method="linear") for q in quantiles]) - 1e-12
            )
            np.testing.assert_array_equal(got[i, mask[i]], (thresholds[:, None] <= values).sum(0))
        assert np.all(got[i, ~mask[i]] == -1)
