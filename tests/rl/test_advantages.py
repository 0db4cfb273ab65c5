"""Group-relative advantages."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_reference as ref
from hypothesis import given, settings
from hypothesis import strategies as st

from compass_jax.rl import advantages, grouping

group_advantage = jax.jit(advantages.group_advantage, static_argnums=(3, 4))

F, T = False, True


def advantage(reward, known, group, n_groups, normalize_std=True):
    return np.asarray(
        group_advantage(
            jnp.asarray(reward),
            jnp.asarray(known),
            jnp.asarray(group, dtype=jnp.int32),
            n_groups,
            normalize_std,
        )[0]
    )


def test_by_hand():
    reward = np.array([1, 0, 0, 1, 0.25, 0.75, np.nan, 7], np.float32)
    group = [0, 1, 0, 0, 1, 1, 0, -1]
    known = [T, T, T, T, T, T, F, T]
    got = advantage(reward, known, group, 2, normalize_std=False)
    np.testing.assert_allclose(
        got, [1 / 3, -1 / 3, -2 / 3, 1 / 3, -1 / 12, 5 / 12, 0, 0], rtol=1e-5, atol=1e-7
    )
    std0 = np.sqrt(2) / 3
    np.testing.assert_allclose(
        advantage(reward, known, group, 2)[[0, 2, 3]], np.array([1, -2, 1]) / 3 / std0, rtol=1e-5
    )


def test_exact_zeros():
    reward = np.array([0.1, 0.1 + 5e-7, 0.1, 1.0, 0.0, 5.0], np.float32)
    group = [0, 0, 0, 1, 1, 2]
    # uniform within 1e-6; one known; a single sample; an absent group
    got = advantage(reward, [T, T, T, T, F, T], group, 4)
    np.testing.assert_array_equal(got, np.zeros(6, np.float32))
    assert np.all(
        advantage(reward + np.array([0, 1e-4, 0, 0, 0, 0], np.float32), [T] * 6, group, 4)[:3] != 0
    )


@pytest.mark.parametrize("normalize_std", [True, False])
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**16))
def test_agrees_with_the_reference(normalize_std, seed):
    toy, rng = ref.make_toy(seed, groups=5, samples=4), np.random.default_rng(seed)
    toy.known &= rng.random(len(toy.known)) < 0.7
    toy.reward = np.where(
        toy.known & (toy.group < 3),
        toy.reward + rng.normal(size=len(toy.reward)) * (toy.group == 2),
        np.nan,
    )
    toy.known &= np.isfinite(toy.reward)
    with jax.enable_x64(True):
        got = advantage(toy.reward, toy.known, toy.group, toy.n_groups, normalize_std)
    np.testing.assert_allclose(got, ref.advantage(toy, normalize_std), rtol=1e-9, atol=1e-12)


def test_shapes_are_checked(unchecked):
    with pytest.raises(ValueError, match=r"known has shape \[2\], expected \[3\]"):
        # without the annotations' own check, which is there in tests alone
        inspect.unwrap(grouping.group_statistics)(
            jnp.zeros(3), jnp.ones(2, bool), jnp.zeros(3, jnp.int32), 1
        )
