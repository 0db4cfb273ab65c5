"""Failure signatures: lines, p-values and bounds compared with numpy, and the rate of false
alarms.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.failures import false_alarm_rate
from compass_jax.config import GuardConfig, RewardConfig
from compass_jax.rl.signatures import (
    CONFIDENCE,
    fall_p,
    parting_p,
    rise_bound,
    spike_size,
    trend,
)
from compass_jax.training.hooks.guard import Guard

RNG = np.random.default_rng(0)
WINDOWS = {n: RNG.normal(size=(5, n)) + np.linspace(0, -2, n) for n in (4, 9, 16)}


def student_below(t, freedom):
    """Returns the t distribution's probability of a value below t, by the trapezoid rule in u where
    t = sinh(u).
    """
    u = np.linspace(-40, np.arcsinh(t), 400_001)
    x = np.sinh(u)
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    constant = math.exp(scale) / math.sqrt(freedom * math.pi)
    density = constant * (1 + x**2 / freedom) ** (-(freedom + 1) / 2) * np.cosh(u)
    return np.trapezoid(density, u)


@pytest.mark.parametrize("n", WINDOWS)
def test_lines_and_p_values_are_those_of_numpy(n):
    for values in WINDOWS[n]:
        (slope, _), covariance = np.polyfit(np.arange(n), values, 1, cov=True)
        line = trend(values)
        assert line.slope == pytest.approx(slope, rel=1e-12)
        error = math.sqrt(covariance[0, 0])
        assert line.error == pytest.approx(error, rel=1e-9)
        expected = student_below(slope / error, n - 2) if slope < 0 else 1.0
        assert fall_p(values) == pytest.approx(expected, rel=1e-6)
    alone = [float(fall_p(values)) for values in WINDOWS[n]]
    np.testing.assert_allclose(fall_p(WINDOWS[n]), alone, rtol=1e-12)


@pytest.mark.parametrize("n", WINDOWS)
def test_the_bound_of_a_rise_is_reached_at_its_confidence(n):
    values = WINDOWS[n][0]
    line, bound = trend(values), rise_bound(values)
    t = (bound / (n - 1) - line.slope) / line.error
    assert student_below(t, n - 2) == pytest.approx(CONFIDENCE, abs=1e-6)


UP, DOWN, FLAT = np.linspace(0, 1, 8), np.linspace(1, 0, 8), np.full(8, 0.3)
BUMPS = np.array([0, 1, -1, 1, 0, -1, 1, -1]) / 50


@pytest.mark.parametrize(
    "reward, gold, parts",
    [
        (UP, DOWN, True),
        (UP + BUMPS, DOWN - BUMPS, True),
        (UP, UP, False),
        (DOWN, DOWN, False),  # the whole run gets worse, and the reward falls with it
        (UP, FLAT, False),
        (FLAT, DOWN, False),
        (DOWN, UP, False),
        (UP, FLAT + BUMPS, False),
    ],
)
def test_they_part_where_the_reward_rises_and_gold_falls(reward, gold, parts):
    assert (parting_p(reward, gold) < 1e-3) == parts


def test_a_spike_is_measured_in_median_distances():
    before = [1.0, 2.0, 3.0, 4.0, 5.0]  # median 3, median distance 1
    assert spike_size(np.array([*before, 3.0])) == 0
    assert spike_size(np.array([*before, -7.0])) == 10
    assert spike_size(np.array([1.0, 1.0, 1.0, 9.0])) == 0  # the median distance is 0


def sound_runs(runs, steps, gold_rise, noise, seed):
    """Returns runs in which rewards rise and gold labels rise or stay. The noise of two steps is
    independent; that of the reward and the label of one step is not.
    """
    draw = np.random.default_rng(seed)
    shared, independent = (draw.standard_normal((2, runs, steps)) for _ in range(2))
    if noise == "shares":  # of 32 answers, a tenth of them right
        independent = (draw.binomial(32, 0.1, (2, runs, steps)) - 3.2) / math.sqrt(32 * 0.09)
    reward, gold = 0.05 * (independent + 0.5 * shared[:1])
    rise = np.linspace(0, 1, steps)
    return 0.2 + 0.5 * rise + reward, 0.3 + gold_rise * rise + gold


@pytest.mark.parametrize("noise", ["normal", "shares"])
@pytest.mark.parametrize("gold_rise", [0.0, 0.3])
@pytest.mark.parametrize("steps, window", [(24, 8), (80, 16)])
def test_at_most_5_percent_of_sound_runs_have_a_false_alarm(noise, gold_rise, steps, window):
    reward, gold = sound_runs(4000, steps, gold_rise, noise, seed=steps)
    starts = range(steps - window + 1)
    level = 0.05 / len(starts)
    p = np.stack([parting_p(reward[:, i : i + window], gold[:, i : i + window]) for i in starts])
    assert np.mean(p.min(0) <= level) <= 0.05


def test_the_rate_of_false_alarms_is_estimated_from_ten_sound_runs():
    """For a single test the rate is about half the level if the reward does not rise, since half of
    such windows rise, and at most the level if it does. A test without the condition on gold would
    alarm far more often.
    """
    flat = sound_runs(10, 60, 0.0, "normal", seed=1)
    rate = false_alarm_rate(*flat, window=16, level=0.05, draws=20_000)
    assert 0.005 < rate <= 0.05
    per_run = false_alarm_rate(*flat, window=16, level=0.05 / 45, draws=200_000) * 45
    assert per_run <= 0.05
    rising = sound_runs(10, 60, 0.4, "normal", seed=2)
    assert false_alarm_rate(*rising, window=16, level=0.05, draws=20_000) < rate
    repeated = false_alarm_rate(*flat, window=16, level=0.05, draws=20_000)
    assert repeated == rate != false_alarm_rate(*flat, 16, 0.05, 20_000, seed=1)


@pytest.mark.parametrize("window, expected", [(12, {2: 17}), (8, {0: 20, 2: 16})])
def test_stored_runs_in_which_a_judge_was_exploited_are_seen_and_sound_ones_are_not(
    window, expected
):
    """The first alarms in 24 steps are at the steps that benchmarks/HISTORY.md gives."""
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "inversion.jsonl"
    alarm_steps = {}
    for row in map(json.loads, file.read_text().splitlines()):
        if row["variant"] == "gold":
            continue
        reward, gold = (np.array(row["series"][f"reward/{x}mean"]) for x in ("", "gold/"))
        tests = len(gold) - window + 1
        starts = (slice(i, i + window) for i in range(tests))
        alarms = [parting_p(reward[s], gold[s]) <= 0.05 / tests for s in starts]
        alarm_steps[row["variant"], row["seed"]] = (
            alarms.index(True) + window if any(alarms) else None
        )
    assert len(alarm_steps) == 20
    assert {key: step for key, step in alarm_steps.items() if step} == {
        ("judge", seed): step for seed, step in expected.items()
    }


def test_an_exploited_reward_is_seen_while_most_of_the_harm_is_to_come():
    """Gold rises for 8 steps and falls for 16, with the noise of a step of 128 answers."""
    caught = []
    for seed in range(20):
        draw = np.random.default_rng(seed)
        gold = np.concatenate([np.linspace(0.3, 0.6, 8), np.linspace(0.58, 0.3, 16)])
        reward = np.linspace(0.2, 0.8, 24) + 0.03 * draw.standard_normal(24)
        gold = gold + 0.03 * draw.standard_normal(24)
        guard = Guard(GuardConfig(window=8), 24, RewardConfig(), lambda kind, text: None)
        level = guard.level
        p = [parting_p(reward[i : i + 8], gold[i : i + 8]) for i in range(17)]
        caught.append(next((i + 8 for i, x in enumerate(p) if x <= level), 99))
    assert max(caught) < 24 and np.median(caught) <= 18
