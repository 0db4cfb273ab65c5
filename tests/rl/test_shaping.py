"""Reward shaping: penalties by hand, the order of answers that they must keep, and advantages of
groups whose answers differ in their penalties alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted import prepare_rows
from tiny_run import tiny_run

from compass_jax.config import ConfigError, RLConfig, ShapingConfig, ZeroVarianceConfig
from compass_jax.rl import shaping

penalties = jax.jit(shaping.penalties, static_argnames=("config", "right_at", "max_new_tokens"))
CONFIG = ShapingConfig(length_penalty=0.05, length_free_tokens=10, repetition_penalty=0.02)


def shaped(reward, length, repetition, config=CONFIG):
    arrays = (
        jnp.asarray(reward, jnp.float32),
        jnp.asarray(length, jnp.int32),
        jnp.asarray(repetition, jnp.float32),
    )
    amounts = penalties(*arrays, config, right_at=1.0, max_new_tokens=50)
    assert set(amounts) == {"length", "repetition", "overlong"}
    return np.asarray(arrays[0] - sum(amounts.values()))


def test_penalties_by_hand_and_for_right_answers_alone():
    got = shaped([1, 1, 1, 1, 0, 0.5], [5, 10, 30, 50, 50, 50], [0, 0, 0.5, 1, 1, 1])
    np.testing.assert_allclose(got, [1, 1, 1 - 0.025 - 0.01, 1 - 0.07, 0, 0.5], rtol=1e-6)


def test_dapos_overlong_penalty_holds_for_all_answers():
    """The penalty is 0 up to L_max - L_cache = 40, then linear down to -0.5 at 50 (arXiv
    2503.14476, eq. 13).
    """
    got = shaped(
        [1, 1, 0, 0, 1],
        [40, 45, 45, 50, 20],
        [0] * 5,
        ShapingConfig(overlong_penalty=0.5, overlong_buffer_tokens=10),
    )
    np.testing.assert_allclose(got, [1, 0.75, -0.25, -0.5, 1], rtol=1e-6)


def run(config, reward, lengths, repetition, group, known=None, rl_zvp=True):
    """Returns the mean advantage of each row, and the metrics; entropies are 1 nat."""
    place = np.arange(51)
    mask = (place >= 1) & (place <= np.asarray(lengths)[:, None])
    known = [True] * len(reward) if known is None else known
    rl = RLConfig(shaping=config, zero_variance=ZeroVarianceConfig(rl_zvp=rl_zvp))
    options = {"max_new_tokens": 50, "repetition": repetition}
    prepared, metrics = prepare_rows(mask, None, reward, known, group, rl, **options)
    rows = zip(np.asarray(prepared.advantage), mask, strict=True)
    return np.array([row[row_mask].mean() for row, row_mask in rows]), metrics


def test_a_uniform_right_group_learns_from_the_penalty_undivided_a_varied_one_from_the_verifier():
    reward, lengths = [1, 1, 1, 1, 0, 1, 0, 0, 1, 1], [10, 30, 50, 50, 20, 30, 10, 50, 5, 8]
    group = [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    config = ShapingConfig(length_penalty=0.05, length_free_tokens=10)
    advantage, metrics = run(config, reward, lengths, [0] * 10, group)
    s = np.array([1, 0.975, 0.95])
    np.testing.assert_allclose(advantage[:3], s - s.mean(), atol=1e-6)
    s = np.array([0.95, 0, 0.975])
    np.testing.assert_allclose(advantage[3:6], (s - s.mean()) / (s.std() + 1e-6), rtol=1e-4)
    # all wrong: entropy is 1 everywhere, and no penalty applies
    assert advantage[6] == advantage[7] == 0
    # both within the free length: still uniform, so RL-ZVP
    np.testing.assert_allclose(advantage[8:], 0.1, rtol=1e-6)
    total = sum(lengths)
    assert metrics["waste/frac_shaping_signal"] == pytest.approx(90 / total) and metrics[
        "waste/frac_verifier_signal"
    ] == pytest.approx(100 / total)
    assert (
        metrics["waste/frac_entropy_signal"] == pytest.approx(73 / total)
        and metrics["advantage/inversion_frac"] == 0
    )
    off, unshaped = run(ShapingConfig(), reward, lengths, [0] * 10, group)
    np.testing.assert_allclose(off[:3], 0.1, rtol=1e-6)
    assert unshaped["waste/frac_shaping_signal"] == 0


def test_the_mean_of_every_component_is_reported_and_they_sum_to_the_shaped_reward():
    """The means are over the known samples alone: right with 5 and 50 tokens, and wrong with 50. An
    unknown one would change every mean.
    """
    config = ShapingConfig(
        length_penalty=0.05,
        repetition_penalty=0.02,
        overlong_penalty=0.1,
        overlong_buffer_tokens=10,
    )
    _, metrics = run(
        config,
        [1, 1, 0, 9],
        [5, 50, 50, 50],
        [0, 0.5, 1, 1],
        [0, 0, 0, 0],
        known=[True, True, True, False],
    )
    expected = {
        "verifier": 2 / 3,
        "length": -(0.005 + 0.05) / 3,
        "repetition": -0.01 / 3,
        "overlong": -0.2 / 3,
    }
    assert {name: metrics[f"reward/{name}/mean"] for name in expected} == pytest.approx(
        expected, rel=1e-5
    )
    _, plain = run(ShapingConfig(), [1, 0], [5, 50], [0, 0], [0, 0])
    assert [name for name in plain if name.startswith("reward/")] == [
        "reward/verifier/mean"
    ] and plain["reward/verifier/mean"] == 0.5


def test_no_allowed_penalty_inverts_a_pair_and_a_larger_one_does():
    """Penalties within the configuration's bound keep the order of random rewards in tenths."""
    rng = np.random.default_rng(0)
    reward = rng.integers(8, 11, 240) / 10
    group, lengths = np.repeat(np.arange(40), 6).tolist(), rng.integers(1, 51, 240)
    inside = ShapingConfig(length_penalty=0.06, repetition_penalty=0.039)
    _, metrics = run(inside, reward, lengths, rng.random(240), group)
    assert metrics["advantage/inversion_frac"] == 0
    outside = ShapingConfig(length_penalty=0.3)
    _, metrics = run(outside, reward, lengths, rng.random(240), group)
    assert metrics["advantage/inversion_frac"] > 0.05


def test_inversion_counts_pairs_of_a_group_with_unequal_rewards():
    mask = jnp.ones((7, 2), bool)
    advantage = jnp.asarray([[2.0, 0], [1, -1], [0, 1], [-1, 3], [5, 5], [9, 9], [0, 0]])
    reward, known = jnp.asarray([1.0, 0, 0.5, 1, 0, 1, 1]), jnp.asarray([True] * 6 + [False])
    group = jnp.asarray([0, 0, 0, 1, 1, -1, 0], jnp.int32)
    # means: 1, 0, 0.5 | 1, 5: pairs (1,0) (1,.5) (.5,0) in order, (1,0) of group 1 the wrong way
    # round
    diagnostics = shaping.inversion(reward, known, advantage, mask, group)
    assert [float(x) for x in diagnostics["advantage/inversion_frac"]] == [1, 4]


@pytest.mark.parametrize(
    "change", [{"length_penalty": -0.1}, {"repetition_ngram": 0}, {"overlong_buffer_tokens": 0}]
)
def test_penalties_that_make_no_sense_are_refused(change):
    with pytest.raises(ConfigError, match=rf"rl\.shaping\.{next(iter(change))}"):
        ShapingConfig(**change).validate()


def test_penalties_that_could_put_a_right_answer_below_a_wrong_one_are_refused_when_loaded():
    base = tiny_run()

    def with_penalties(gap=1.0, **penalties):
        rl, rewards = (
            dataclasses.replace(base.rl, shaping=ShapingConfig(**penalties)),
            dataclasses.replace(base.rewards, smallest_gap=gap),
        )
        return dataclasses.replace(base, rl=rl, rewards=rewards)

    with_penalties(gap=0.1, length_penalty=0.05, repetition_penalty=0.04).validate_for_rl()
    with_penalties(overlong_penalty=0.5).validate_for_rl()
    for options in (
        {"gap": 0.1, "length_penalty": 0.06, "repetition_penalty": 0.04},
        {"overlong_penalty": 1.0},
    ):
        with pytest.raises(
            ConfigError, match=r"the penalties sum to .* not below .* \(rewards.smallest_gap\)"
        ):
            with_penalties(**options).validate_for_rl()
    with pytest.raises(
        ConfigError, match=r"overlong_buffer_tokens = 99 exceeds rollout.max_new_tokens = 16"
    ):
        with_penalties(overlong_buffer_tokens=99).validate_for_rl()
