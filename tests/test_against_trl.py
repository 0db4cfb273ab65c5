"""The comparison with TRL: the choice of its settings, and the steps that our side runs."""

import json
import os
import sys

import pytest

from benchmarks import against_trl, trl_accuracy
from benchmarks.against_trl import CASES


def test_the_settings_of_trl_are_those_of_its_shortest_step(monkeypatch, tmp_path):
    seconds = {"rows": {64: 3.0, 16: 2.0}, "attention": {"sdpa": 0.5, "eager": 0.0}}
    seconds["experts"] = {"grouped_mm": 0.2, "eager": 0.1}

    def stand_in(case, folder, python, choice, steps, seed):
        return {"step_s": sum(times[choice[name]] for name, times in seconds.items())}

    monkeypatch.setattr(against_trl, "theirs", stand_in)
    best, tried = against_trl.calibrate(CASES["moe"], tmp_path, "python")
    assert best == {"rows": 16, "attention": "eager", "experts": "eager"}
    assert tried["rows=64"] == 3.7 and tried["experts=eager"] == 2.1


def test_the_first_steps_are_not_counted():
    steps = [{"step_s": x, "rollout_s": x / 2} for x in (9.0, 8.0, 1.0, 2.0, 3.0)]
    assert against_trl._medians(steps) == {"step_s": 2.0, "rollout_s": 1.0}


def test_a_command_whose_time_is_over_gets_sigterm_and_may_end_well(tmp_path):
    waits = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit({}))"
    waits += "; print('ready', flush=True); time.sleep(60)"
    words = [sys.executable, "-c", waits.format(143)]
    text, peak = against_trl.execute(words, tmp_path, os.environ, seconds=2)
    assert text == "ready\n" and peak > 0.005
    with pytest.raises(RuntimeError, match="ready"):
        against_trl.execute(
            [sys.executable, "-c", waits.format(1)], tmp_path, os.environ, seconds=2
        )


@pytest.mark.parametrize(
    "response,reward",
    [
        ("dog: 3 * 4 = 12\n<answer>12</answer>", 1.0),
        ("<answer>3</answer> no: <answer> 12 </answer>", 1.0),
        ("<answer>12</answer> no: <answer>3</answer>", 0.0),
        ("<answer>12", 0.0),
        ("12</answer>", 0.0),
        ("12", 0.0),
    ],
)
def test_the_reward_of_both_sides_is_the_last_answer(response, reward):
    scope = {}
    exec(trl_accuracy.REWARD, scope)
    assert scope["score"](response, "12") == reward


@pytest.mark.slow
def test_our_side_runs_the_steps_of_the_case(tmp_path):
    case = CASES["tiny"]
    against_trl.make(case, tmp_path)
    measured = against_trl.ours(case, tmp_path, 3, 0)
    assert (
        0 < measured["rollout_s"] < measured["step_s"] and 0 < measured["tokens"] <= case.new_tokens
    )
    (config,) = tmp_path.glob("runs/*/rl/config.json")
    rl = json.loads(config.read_text())["rl"]
    assert rl["prompts_per_step"] == case.prompts and rl["group_size"] == case.group
    assert rl["objective"]["kl_coef"] == 0 and rl["updates_per_rollout"] == 1
