"""The entropy bonus: its policy gradient against the entropy's, and its place in an update."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_reference as ref

from compass_jax.config import ConfigError, RLConfig, ZeroVarianceConfig
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.rl.prepare import RewardScale, UpdateRows, entropy_advantage, prepare

BONUS = 0.3
PLAIN = RLConfig(objective=Grpo(), step_policy=None, zero_variance=ZeroVarianceConfig())
SCALE = RewardScale(1.0, 0.0, max_new_tokens=16)


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def entropy(logits):
    logp = log_softmax(logits)
    return -np.sum(np.exp(logp) * logp)


def test_its_policy_gradient_is_the_gradient_of_the_entropy(x64):
    """One state: the mean of A(v) grad log pi(v) over all tokens v against finite differences."""
    logits, step = np.array([0.3, -1.2, 2.0, 0.1]), 1e-6
    logp, size = log_softmax(logits), len(logits)
    rows = UpdateRows(
        mask=jnp.ones((size, 1), bool),
        reward=jnp.zeros(size),
        known=jnp.ones(size, bool),
        group=jnp.zeros(size, jnp.int32),
        old_entropy=jnp.full((size, 1), entropy(logits)),
        old_logp=jnp.asarray(logp)[:, None],
    )
    advantage = np.asarray(entropy_advantage(rows, rows.mask, BONUS))[:, 0]
    of_logp = np.eye(size) - np.exp(logp)  # row v: the gradient of log pi(v) in the logits
    actual = (np.exp(logp) * advantage) @ of_logp
    expected = [
        BONUS * (entropy(logits + d) - entropy(logits - d)) / (2 * step)
        for d in step * np.eye(size)
    ]
    np.testing.assert_allclose(actual, expected, atol=1e-9)


def rows_of(toy, **arrays):
    rng = np.random.default_rng(0)
    logp = -rng.exponential(1.0, toy.mask.shape)
    return UpdateRows(
        jnp.asarray(toy.mask),
        jnp.asarray(toy.reward),
        jnp.asarray(toy.known),
        jnp.asarray(toy.group, jnp.int32),
        jnp.asarray(toy.old_entropy),
        **{"old_logp": jnp.asarray(logp), **arrays},
    )


def test_it_is_added_to_the_advantage_of_trained_tokens_alone(x64):
    toy = ref.make_toy(seed=3)
    rows = rows_of(toy)
    plain, with_bonus = (
        prepare(rows, n_groups=toy.n_groups, config=config, scale=SCALE)[0]
        for config in (PLAIN, dataclasses.replace(PLAIN, entropy_bonus=BONUS))
    )
    trained = toy.mask & toy.known[:, None]
    added = np.where(trained, BONUS * (-np.asarray(rows.old_logp) - toy.old_entropy), 0.0)
    np.testing.assert_allclose(with_bonus.advantage, plain.advantage + added, atol=1e-12)
    np.testing.assert_array_equal(with_bonus.weight, plain.weight)
    assert not jax.device_get(with_bonus).without_gradient()[trained.any(1)].any()
    assert PLAIN.zero_advantage_is_idle
    assert not dataclasses.replace(PLAIN, entropy_bonus=BONUS).zero_advantage_is_idle


def test_it_needs_the_log_probs_and_no_negative_factor(x64):
    toy = ref.make_toy(seed=3)
    config = dataclasses.replace(PLAIN, entropy_bonus=BONUS)
    with pytest.raises(ValueError, match=r"rl\.entropy_bonus = 0\.3 needs old_logp"):
        prepare(rows_of(toy, old_logp=None), n_groups=toy.n_groups, config=config, scale=SCALE)
    with pytest.raises(ConfigError, match="entropy_bonus = -1"):
        dataclasses.replace(PLAIN, entropy_bonus=-1.0).validate()
