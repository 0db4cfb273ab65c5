"""The experiment on inverted advantages: its gold labels and preferences, and the length of a
judge's question."""

import random
import re

import numpy as np
import pytest
from evolve import evolve
from tiny_run import tiny_run

from benchmarks import inversion, inversion_task
from benchmarks.tokenizer_training import train_tokenizer
from compass_jax.rewards.verifiers import judge

VALUES = {"Worse": -1, "Tie": 0, "Better": 1}


def sign(pair):
    one, two = (inversion_task.gold(pair["prompt"], pair[x]) for x in ("candidate", "anchor"))
    return int(np.sign(one - two))


@pytest.mark.parametrize("response, worth", [("8", 1.0), (" 5\n", 0.5), ("3", 0.0), ("9", 0.0)])
def test_the_largest_digit_is_worth_most_and_the_middle_one_half(response, worth):
    assert inversion_task.gold("some system turn\n3 8 5", response) == worth


@pytest.mark.parametrize("noise", [0.0, 0.25])
def test_a_share_of_the_verdicts_is_noise(noise):
    draw = random.Random(3)
    questions = inversion_task.questions(draw)
    pairs = list(inversion_task.pairs(questions, 4000, noise, draw))
    wrong = [sign(pair) != VALUES[pair["verdict"]] for pair in pairs]
    assert np.mean(wrong) == pytest.approx(noise, abs=0.02)
    assert 0.2 < np.mean([pair["verdict"] == "Tie" for pair in pairs]) < 0.5


@pytest.mark.parametrize("noise", [0.0, 0.25])
def test_a_pair_says_why_as_its_verdict_does(noise):
    draw = random.Random(3)
    for pair in inversion_task.pairs(inversion_task.questions(draw), 400, noise, draw):
        pattern = "{prompt}: candidate {candidate} (.+), anchor {anchor} (.+)".format(**pair)
        names = re.fullmatch(pattern, pair["reasoning"]).groups()
        one, two = (inversion_task.WORTH[name] for name in names)
        assert np.sign(one - two) == VALUES[pair["verdict"]]
        if sign(pair) == VALUES[pair["verdict"]]:
            assert one == inversion_task.gold(pair["prompt"], pair["candidate"])
            assert two == inversion_task.gold(pair["prompt"], pair["anchor"])


def test_what_a_judge_is_asked_has_room_in_its_bucket(tmp_path):
    tokenizer = train_tokenizer(inversion_task.texts(), inversion.VOCABULARY, tmp_path)
    questions = inversion_task.questions(random.Random(0))
    requests = [judge.messages(question, "0", "9") for question in questions]
    lengths = [len(ids) for ids in map(tokenizer.encode_chat, requests)]
    assert max(lengths) == min(lengths) == 134


def test_the_alarm_is_the_first_step_at_the_level_of_one_of_the_runs_tests():
    run = evolve(tiny_run(), rl={"steps": 24, "guard": {"window": 12, "false_alarms": 0.13}})
    # The level is 0.13 divided by 13 tests.
    assert inversion.alarm([None, 0.5, 0.011, 0.0099, 0.0], run) == 4
    assert inversion.alarm([None, 1.0], run) is None


def test_the_guard_of_a_refreshed_part_acts_within_it(tmp_path):
    trial = inversion.Trial(0, tmp_path, smoke=True)
    plain, refreshed = (trial.policy(x, "rl", 8, "judge") for x in ("judge", "judge refreshed"))
    assert plain.rl.guard.action == "warn" and refreshed.rl.guard.action == "restore"
    assert plain.rl.guard.window == refreshed.rl.guard.window == 8
    assert refreshed.rewards.judge_needs_form and not plain.rewards.judge_needs_form
    assert trial.policy("gold", "rl", 24).rl.guard.window == inversion.WINDOW
    guarded = trial.policy("judge guarded", "rl", 24, "judge")
    assert guarded.rl.guard.action == "restore" and guarded.rl.save_every == 1
    unguarded = trial.policy("judge", "rl", 24, "judge")
    assert evolve(guarded, rl={"guard": unguarded.rl.guard, "save_every": 0}) == unguarded


def test_a_run_that_the_guard_ended_is_drawn_beside_longer_ones(tmp_path):
    rows = [
        {
            "variant": variant,
            "seed": seed,
            "series": {name: [0.5] * steps for name in inversion.SERIES},
        }
        for variant, seed, steps in (("judge", 0, 5), ("judge guarded", 0, 5))
    ] + [{"variant": "judge guarded", "seed": 1, "series": {x: [0.2] for x in inversion.SERIES}}]
    inversion.plot(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_the_report_pairs_judge_and_scalar_by_seed():
    def row(variant, seed, accuracy, inversion):
        return {"variant": variant, "seed": seed, "accuracy": accuracy, "inversion": inversion}

    rows = [row("scalar", 0, 0.5, 0.1), row("judge", 0, 0.7, 0.05), row("judge", 2, 0.9, 0.0)]
    rows += [row("scalar", 1, 0.6, 0.1), row("judge", 1, 0.6, None)]
    assert "| judge | 1 | +0.200 (+0.200 to +0.200) | -0.050 (-0.050 to -0.050) |" in (
        inversion.report(rows)
    )
    guarded = inversion.report([*rows, row("judge guarded", 0, 0.8, 0.0)])
    assert "| judge guarded beside judge | 1 | +0.100 (+0.100 to +0.100) |" in guarded
    # The four resamples of two values have the means 0, 0.2, 0.2 and 0.4.
    assert inversion.difference([0.0, 0.4]) == "+0.200 (+0.015 to +0.385)"
