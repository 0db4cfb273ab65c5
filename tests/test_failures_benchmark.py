"""The experiment on failure signatures: the runs that it draws, and its sound runs."""

import numpy as np
import pytest

from benchmarks import failures


def row(variant, alarm=None, reward=0.0, gold=0.0, noise=0.02, seed=0):
    draw, steps = np.random.default_rng(seed), np.arange(24)
    series = {
        "reward/mean": list(reward * steps + noise * draw.standard_normal(24)),
        "reward/gold/mean": list(gold * steps + noise * draw.standard_normal(24)),
    }
    return {"variant": variant, "alarm": alarm, "series": series}


def test_the_picture_is_of_the_judge_with_the_earliest_alarm():
    rows = [row("judge", None), row("judge", 20), row("judge", 17), row("scalar", 3)]
    assert failures.parted(rows) is rows[2]
    with pytest.raises(SystemExit, match="no judge-trained run with an alarm"):
        failures.parted([rows[0], rows[3]])


def test_false_alarms_are_few_in_sound_runs_of_which_ten_are_needed():
    sound = [row("scalar", reward=0.01, seed=n) for n in range(10)]
    estimate = failures.false_alarms([row("judge", gold=-1.0), *sound])
    assert estimate["runs"] == 10 and estimate["tests"] == 13
    assert 0 < estimate["of_a_run"] < 0.07
    with pytest.raises(SystemExit, match="9 runs with a scalar model, 10 are needed"):
        failures.false_alarms(sound[1:])
