"""Advantages of responses, each compared with its equation in float64 numpy."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_reference as ref
from hypothesis import given, settings
from hypothesis import strategies as st

from compass_jax.config.seam import ComponentFailed
from compass_jax.rl import group_advantage as advantages
from compass_jax.rl import grouping
from compass_jax.rl.advantages.grpo import GrpoAdvantage
from compass_jax.rl.advantages.maxrl import MaxRL
from compass_jax.rl.advantages.predicted import Predicted
from compass_jax.rl.advantages.reinforce_pp import ReinforcePlusPlus
from compass_jax.rl.advantages.rloo import Rloo
from compass_jax.rl.advantages.shrunk import Shrunk

group_advantage = jax.jit(
    advantages.group_advantage, static_argnums=(0, 4), static_argnames="divides_by_std"
)

F, T = False, True
RELATIVE = {
    "grpo": (GrpoAdvantage(), ref.advantage),
    "undivided": (GrpoAdvantage(divide_by_std=False), lambda toy: ref.advantage(toy, False)),
    "rloo": (Rloo(), ref.rloo),
    "reinforce_pp": (ReinforcePlusPlus(), ref.reinforce_pp),
    "maxrl": (MaxRL(), ref.maxrl),
}
PREDICTING = {
    "predicted": (Predicted(), ref.predicted),
    "predicted, not normalised": (
        Predicted(normalise=False),
        lambda toy: ref.predicted(toy, False),
    ),
    "shrunk": (Shrunk(), ref.shrunk),
    "shrunk, not normalised": (
        Shrunk(0.3, normalise=False),
        lambda toy: ref.shrunk(toy, 0.3, False),
    ),
}
EVERY = RELATIVE | PREDICTING


def responses(advantage, reward, known, group, n_groups, **options):
    arrays = jnp.asarray(reward), jnp.asarray(known), jnp.asarray(group, dtype=jnp.int32)
    return np.asarray(group_advantage(advantage, *arrays, n_groups, **options)[0])


def predictions(rates, concentration, samples):
    """Returns the columns of groups of as many samples each, in the types of a run."""
    rate = np.repeat(np.asarray(rates, np.float32), samples)
    columns = {"predicted": rate, "concentration": np.full_like(rate, concentration)}
    return {name: jnp.asarray(column) for name, column in columns.items()}


def test_by_hand():
    reward = np.array([1, 0, 0, 1, 0.25, 0.75, np.nan, 7], np.float32)
    group = [0, 1, 0, 0, 1, 1, 0, -1]
    known = [T, T, T, T, T, T, F, T]
    undivided = responses(GrpoAdvantage(divide_by_std=False), reward, known, group, 2)
    expected = np.array([1 / 3, -1 / 3, -2 / 3, 1 / 3, -1 / 12, 5 / 12, 0, 0])
    np.testing.assert_allclose(undivided, expected, rtol=1e-5, atol=1e-7)
    divided = responses(GrpoAdvantage(), reward, known, group, 2)
    std = np.sqrt(2) / 3
    np.testing.assert_allclose(divided[[0, 2, 3]], np.array([1, -2, 1]) / 3 / std, rtol=1e-5)
    rloo = responses(Rloo(), reward, known, group, 2)  # of group 0: 1 - (0 + 1) / 2 and so on
    np.testing.assert_allclose(rloo[[0, 2, 3]], [0.5, -1, 0.5], rtol=1e-5)
    maxrl = responses(MaxRL(), reward, known, group, 2)  # of group 0: (1 - 2/3) / (2/3)
    np.testing.assert_allclose(maxrl[[0, 2, 3]], [0.5, -1, 0.5], rtol=1e-5)
    reinforce_pp = responses(ReinforcePlusPlus(), reward, known, group, 2)
    np.testing.assert_allclose(reinforce_pp, expected / expected[:6].std(), rtol=1e-4, atol=1e-7)


def test_maxrl_has_no_advantage_where_a_reward_is_negative():
    """The mean of the second group is 0.00625, which would divide to advantages of -81 and 159."""
    reward = np.array([1, 0, 0, 1, -0.5, 1, -0.4875, 0.0125], np.float32)
    maxrl = responses(MaxRL(), reward, [T] * 8, [0] * 4 + [1] * 4, 2)
    np.testing.assert_allclose(maxrl, [1, -1, -1, 1, 0, 0, 0, 0], rtol=1e-5)


def test_dr_grpos_objective_forbids_the_division():
    reward, group = np.array([1, 0, 0, 1], np.float32), [0, 0, 0, 0]
    free, forbidden = (
        responses(GrpoAdvantage(), reward, [T] * 4, group, 1, divides_by_std=x) for x in (T, F)
    )
    np.testing.assert_allclose(forbidden, [0.5, -0.5, -0.5, 0.5])
    np.testing.assert_allclose(free, [1, -1, -1, 1], rtol=1e-5)


@pytest.mark.parametrize("name", RELATIVE)
def test_exact_zeros(name):
    advantage = EVERY[name][0]
    reward = np.array([0.1, 0.1 + 5e-7, 0.1, 1.0, 0.0, 5.0], np.float32)
    group = [0, 0, 0, 1, 1, 2]
    # uniform within 1e-6; one known; a single sample; an absent group
    zeros = responses(advantage, reward, [T, T, T, T, F, T], group, 4)
    np.testing.assert_array_equal(zeros, np.zeros(6, np.float32))
    differing = reward + np.array([0, 1e-4, 0, 0, 0, 0], np.float32)
    assert np.all(responses(advantage, differing, [T] * 6, group, 4)[:3] != 0)


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**16))
def test_agrees_with_the_reference(name, seed):
    advantage, reference = EVERY[name]
    toy, rng = ref.make_toy(seed, groups=5, samples=4), np.random.default_rng(seed)
    toy.known &= rng.random(len(toy.known)) < 0.7
    noise = rng.random(len(toy.reward)) * (toy.group == 2)
    toy.reward = np.where(toy.known & (toy.group < 3), toy.reward + noise, np.nan)
    toy.known &= np.isfinite(toy.reward)
    with jax.enable_x64(True):
        columns = {x: jnp.asarray(column) for x, column in toy.columns.items()}
        arrays = toy.reward, toy.known, toy.group, toy.n_groups
        got = responses(advantage, *arrays, columns=columns)
    np.testing.assert_allclose(got, reference(toy), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_a_better_response_never_has_the_lower_advantage(name):
    rng = np.random.default_rng(0)
    reward, group = rng.random(32).astype(np.float32), np.repeat(np.arange(4), 8)
    columns = predictions([0.3, 0.9, 0.5, 0.1], 4.0, 8)
    got = responses(EVERY[name][0], reward, [T] * 32, group, 4, columns=columns)
    for g in range(4):
        rows = np.flatnonzero(group == g)
        np.testing.assert_array_equal(np.argsort(reward[rows]), np.argsort(got[rows]))


@pytest.mark.parametrize("name", RELATIVE)
def test_a_group_that_only_shaping_tells_apart_is_never_divided(name):
    reward, shaped = np.ones(4, np.float32), np.array([1, 0.99, 0.97, 1], np.float32)
    arrays = jnp.asarray(reward), jnp.ones(4, bool), jnp.zeros(4, jnp.int32)
    got, by_shaping = group_advantage(EVERY[name][0], *arrays, 1, shaped=jnp.asarray(shaped))
    np.testing.assert_allclose(got, shaped - shaped.mean(), atol=1e-7)
    assert by_shaping.all()


def test_a_prediction_by_hand():
    """A group of three, one of equal rewards, and one with a single known reward."""
    reward = np.array([1, 0, 0, 1, 1, 1, 0, np.nan, np.nan], np.float32)
    known, group = [T] * 7 + [F] * 2, [0, 0, 0, 1, 1, 1, 2, 2, 2]
    columns = predictions([0.25, 0.5, 0.75], 2.0, 3)
    rest = known, group, 3
    got = responses(Predicted(normalise=False), reward, *rest, columns=columns)
    expected = np.array([0.75, -0.25, -0.25, 0.5, 0.5, 0.5, -0.75, 0, 0])
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    counted = expected[:7]
    got = responses(Predicted(), reward, *rest, columns=columns)
    np.testing.assert_allclose(
        got[:7], (counted - counted.mean()) / (counted.std() + 1e-4), rtol=1e-5
    )
    assert not got[7:].any()
    # the baselines (2 * 0.25 + 0) / 4, (2 * 0.25 + 1) / 4; (2 * 0.5 + 2) / 4; 0.75
    got = responses(Shrunk(normalise=False), reward, *rest, columns=columns)
    expected = [7 / 8, -3 / 8, -3 / 8, 1 / 4, 1 / 4, 1 / 4, -3 / 4, 0, 0]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    # the third sample of each group is of a later round: no other one's baseline has its reward
    columns["first"] = jnp.asarray([T, T, F] * 3)
    got = responses(Shrunk(normalise=False), reward, *rest, columns=columns)
    # (2 * 0.25 + 0) / 3, (2 * 0.25 + 1) / 3, (2 * 0.25 + 1) / 4; (2 * 0.5 + 1) / 3 and ... / 4
    expected = [5 / 6, -1 / 2, -3 / 8, 1 / 3, 1 / 3, 1 / 4, -3 / 4, 0, 0]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_prediction_is_in_the_units_of_the_rewards():
    reward, columns = np.array([1, -1, 0.5], np.float32), predictions([0.25], 2.0, 3)
    options = {"columns": columns, "right_at": 1.0, "wrong_at": -1.0}
    got = responses(Predicted(normalise=False), reward, [T] * 3, [0] * 3, 1, **options)
    np.testing.assert_allclose(got, [1.5, -0.5, 1.0], rtol=1e-6)


@pytest.mark.parametrize("strength", [0.0, np.inf])
@pytest.mark.parametrize("seed", range(3))
def test_the_limits_of_the_strength_are_rloo_and_the_prediction(seed, strength, x64):
    toy = ref.make_toy(seed, groups=6, samples=4)
    columns = {x: jnp.asarray(column) for x, column in toy.columns.items() if x != "first"}
    arrays = toy.reward, toy.known, toy.group, toy.n_groups
    limit = Predicted(normalise=False) if strength else Rloo()
    got, expected = (
        responses(x, *arrays, columns=columns) for x in (Shrunk(strength, normalise=False), limit)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)
    assert np.abs(expected).max() > 0.4


def test_equal_differences_stay_near_0_in_float32():
    """All answers to prompts of one prediction are wrong. Division by a standard deviation that is
    a rounding error would make this the largest advantage of a run.
    """
    for rate in (0.1, 0.3, 0.7):
        columns = predictions([rate] * 250, 2.0, 4)
        arrays = np.zeros(1000, np.float32), [T] * 1000, np.repeat(np.arange(250), 4), 250
        assert np.abs(responses(Predicted(), *arrays, columns=columns)).max() < 0.01


@pytest.mark.parametrize("name", PREDICTING)
def test_penalties_count_as_reward_below_the_prediction(name):
    """A prediction of raw rewards is not shaped; a group that shaping tells apart says so."""
    reward, shaped = np.ones(4, np.float32), np.array([1, 0.99, 0.97, 1], np.float32)
    options = {"columns": predictions([0.5], 4.0, 4)}
    arrays = jnp.asarray(reward), jnp.ones(4, bool), jnp.zeros(4, jnp.int32), 1
    advantage = EVERY[name][0]
    got, by_shaping = group_advantage(advantage, *arrays, shaped=jnp.asarray(shaped), **options)
    np.testing.assert_array_equal(got, responses(advantage, shaped, [T] * 4, [0] * 4, 1, **options))
    assert by_shaping.all() and got[2] == np.min(got) < got[1] < got[0]


def test_a_missing_prediction_is_named():
    for name in PREDICTING:
        with pytest.raises(ValueError, match=r"reads the column '(predicted|concentration)'"):
            responses(EVERY[name][0], np.ones(4, np.float32), [T] * 4, [0] * 4, 1)


def test_shapes_are_checked(unchecked):
    with pytest.raises(ValueError, match=r"known has shape \[2\], expected \[3\]"):
        # without the runtime check of annotations, which is active in tests alone
        inspect.unwrap(grouping.group_statistics)(
            jnp.zeros(3), jnp.ones(2, bool), jnp.zeros(3, jnp.int32), 1
        )


class ByGroup(GrpoAdvantage):
    """An advantage of a user's with a wrong shape."""

    def responses(self, inputs):
        return inputs.statistics.mean


class Constant(GrpoAdvantage):
    """An advantage of a user's that returns a number."""

    def responses(self, inputs):
        return 0.5


@pytest.mark.parametrize(("advantage", "given"), [(ByGroup(), "[1]"), (Constant(), "[]")])
def test_an_advantage_of_another_shape_is_refused_by_name(advantage, given):
    reward, group = jnp.array([0.0, 1.0, 1.0]), jnp.zeros(3, jnp.int32)
    with pytest.raises(ComponentFailed, match="has shape") as error:
        advantages.group_advantage(advantage, reward, jnp.ones(3, bool), group, 1)
    assert f"{advantage.name!r}: responses failed: ValueError" in str(error.value)
    assert f"responses: result has shape {given}, expected [3]" in str(error.value)
