"""The normaliser: means within the response, over samples, over groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_reference as ref

from compass_jax.rl import policy
from compass_jax.rl.objectives.cispo import Cispo
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo, dapo_surrogate, dr_grpo
from compass_jax.rl.objectives.gspo import Gspo

token_weights = jax.jit(policy.token_weights, static_argnums=(3, 4, 6, 7))
F, T = False, True


def test_token_mean_by_hand():
    mask = jnp.asarray([[F, T, T, F], [F, T, T, T], [F, T, F, F], [F, T, T, F], [F, T, T, T]])
    group = jnp.asarray([0, 0, 1, 2, -1], jnp.int32)
    # group 2 has no known sample: it is not counted; the last row is padding
    known = jnp.asarray([T, T, T, F, T])
    for objective in (Grpo(), Gspo()):
        weight = token_weights(mask, group, known, 3, objective)
        expected = [
            [0, 1 / 8, 1 / 8, 0],
            [0, 1 / 12, 1 / 12, 1 / 12],
            [0, 1 / 2, 0, 0],
            [0] * 4,
            [0] * 4,
        ]
        np.testing.assert_allclose(weight, np.array(expected, np.float32), rtol=1e-6)


def test_a_grown_group_weighs_no_more():
    mask = jnp.ones((6, 2), bool)
    weight = token_weights(
        mask,
        jnp.asarray([0, 1, 1, 1, 1, 1], jnp.int32),
        jnp.ones(6, bool),
        2,
        Grpo(),
    )
    np.testing.assert_allclose(weight[0].sum(), 0.5)
    np.testing.assert_allclose(weight[1:].sum(), 0.5, rtol=1e-6)


@pytest.mark.parametrize(
    "objective",
    [Grpo(), dapo_surrogate(), dr_grpo(), Gspo(), Cispo(), Espo(quantiles=())],
    ids=["grpo", "dapo", "dr_grpo", "gspo", "cispo", "espo"],
)
def test_an_objective_says_whether_a_sample_weighs_less_in_a_larger_group(objective):
    mask, group = jnp.ones((6, 2), bool), jnp.asarray([0, 0, 1, 1, 1, 1], jnp.int32)
    entropy_group, known = jnp.zeros((6, 2), jnp.int32), jnp.ones(6, bool)
    rest = known, 2, objective, entropy_group, jnp.float32, 8
    weight = np.asarray(token_weights(mask, group, *rest).sum(1))
    ratio = 2 if objective.averages_groups else 1
    np.testing.assert_allclose(weight[:2], ratio * weight[2:4], rtol=1e-6)


def test_espo_weighs_entropy_groups_alike_and_skips_empty_ones():
    mask = jnp.asarray([[F, T, T, T, T, T], [F, T, T, F, F, F]])
    entropy_group = jnp.asarray([[-1, 0, 0, 2, 0, 0], [-1, 1, 1, -1, -1, -1]], jnp.int32)
    weight = token_weights(
        mask,
        jnp.asarray([0, 0], jnp.int32),
        jnp.ones(2, bool),
        1,
        Espo(quantiles=(0.5, 0.8)),
        entropy_group,
    )
    expected = [[0, 1 / 16, 1 / 16, 1 / 4, 1 / 16, 1 / 16], [0, 1 / 4, 1 / 4, 0, 0, 0]]
    np.testing.assert_allclose(weight, np.array(expected, np.float32), rtol=1e-6)


@pytest.mark.parametrize(
    "config",
    [Grpo(), Espo(), Espo(quantiles=(0.2, 0.5, 0.8))],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_weights_sum_to_one(config, seed, x64):
    toy = ref.make_toy(seed)
    toy.mask[:, 2] = True  # every response has a token
    mask = jnp.asarray(toy.mask)
    groups = config.groups(jnp.asarray(toy.old_entropy), mask)
    weight = token_weights(
        mask,
        jnp.asarray(toy.group),
        jnp.asarray(toy.known),
        toy.n_groups,
        config,
        groups,
        jnp.float64,
    )
    np.testing.assert_allclose(weight.sum(), 1, rtol=1e-12)
    rows = toy.known & (toy.group >= 0)
    np.testing.assert_array_equal(np.asarray(weight) > 0, toy.mask & rows[:, None])


def test_no_known_sample_at_all_gives_zero_weights():
    mask = jnp.ones((2, 3), bool)
    weight = token_weights(mask, jnp.zeros(2, jnp.int32), jnp.zeros(2, bool), 1, Gspo())
    np.testing.assert_array_equal(weight, np.zeros((2, 3), np.float32))


def test_espo_without_entropy_groups_is_refused():
    with pytest.raises(ValueError, match="espo needs entropy_group"):
        token_weights(jnp.ones((1, 2), bool), jnp.zeros(1, jnp.int32), jnp.ones(1, bool), 1, Espo())


def test_dr_grpo_divides_by_a_constant_that_must_be_given():
    mask, group, known = (
        jnp.asarray([[T, T, F], [T, F, F]]),
        jnp.zeros(2, jnp.int32),
        jnp.ones(2, bool),
    )
    weight = token_weights(mask, group, known, 1, dr_grpo(), None, jnp.float32, 8)
    np.testing.assert_allclose(weight, np.array([[1 / 16, 1 / 16, 0], [1 / 16, 0, 0]], np.float32))
    with pytest.raises(ValueError, match="dr_grpo needs max_new_tokens"):
        token_weights(mask, group, known, 1, dr_grpo())
