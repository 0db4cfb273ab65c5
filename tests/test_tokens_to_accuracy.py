"""The experiment on tokens to an accuracy: its task, its measure by hand, its plan with a stand-in
for training, and a valid configuration for every trial of every arm."""

import dataclasses
import itertools
import math
import threading
import time
from collections import Counter

import numpy as np
import pytest

from benchmarks import experiments, tokens_report
from benchmarks import tokens_to_accuracy as experiment
from benchmarks.targets import cost_to_stay, means_of_evaluations, target_of
from benchmarks.tokens_report import Ratio
from compass_jax.commands.configs import mostly_hard_cpu
from compass_jax.data.keep import kept_prompts
from compass_jax.data.prompts import heldout_prompts, train_prompts
from compass_jax.data.sft import sft_examples
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.runs.report.targets import first_passage, means_over


def test_most_prompts_are_too_hard_and_held_out_ones_are_of_the_same_mix(tmp_path):
    config = experiment.sized(
        experiment.base_config(0, tmp_path, smoke=False),
        experiment.Cell(8, 8, 3e-4),
        experiment.FULL,
    )
    config.validate_for_rl()
    tokenizer, shares = load_tokenizer(config.data, config.model.vocab_size), []
    for prompts in (train_prompts, heldout_prompts):
        every = prompts(config.data, tokenizer, 0, print)
        assert max(len(x.tokens) for x in every) <= mostly_hard_cpu.PROMPT
        hard = [x for x in every if x.label not in ("sum_2x1", "sum_3x1", "sum_4x1", "sum_5x1")]
        shares.append(len(hard) / len(every))
    assert 0.6 < shares[0] < 0.7 and abs(shares[0] - shares[1]) < 0.1


def test_the_cold_start_works_out_too_hard_sums_within_a_rollout(tmp_path):
    config = experiment.base_config(0, tmp_path, smoke=False)
    labels = {f"sum_{terms}x{digits}" for terms, digits in mostly_hard_cpu.TOO_HARD}
    examples, counts = sft_examples(
        config.sft, config.scored, load_tokenizer(config.data, config.model.vocab_size), print
    )
    lengths = [int(x.mask.sum()) for x in examples if x.label in labels]
    assert len(lengths) == mostly_hard_cpu.WORKED_SOLUTIONS * len(labels) and not counts["too_long"]
    assert np.mean(lengths) > 40 and max(lengths) <= mostly_hard_cpu.ANSWER


def row(variant, seed, accuracies, step=100, **changes):
    curve = [[step * i, 0.5 * i, accuracy] for i, accuracy in enumerate(accuracies)]
    shares = {"verifier_signal": 0.25}
    common = {"phase": "arms", "name": variant, "uniform_frac": 0.7, "shares": shares}
    fields = {"variant": variant, "seed": seed, "tokens": curve[-1][0], "curve": curve}
    return common | fields | changes


def test_the_cost_is_that_from_which_the_smoothed_curve_stays_at_the_target():
    # The smoothed values are 0.1 (the start), 0.4, 0.3, 0.4, 0.5, 0.7.
    curve = [[100 * i, a] for i, a in enumerate([0.1, 0.4, 0.2, 0.6, 0.7, 0.8])]
    smoothed = [accuracy for _, accuracy in means_of_evaluations(curve)]
    assert smoothed == pytest.approx([0.1, 0.4, 0.3, 0.4, 0.5, 0.7])
    means = means_of_evaluations(curve)
    # The curve first reaches 0.35 before 100, but falls below it again.
    assert cost_to_stay(means, 0.35) == (pytest.approx(250), True)
    assert cost_to_stay(means, 0.6) == (pytest.approx(450), True)
    assert cost_to_stay(means, 0.75) == (500, False)
    assert cost_to_stay(means, 0.05) == (0, True)
    assert first_passage(means, 0.35) == pytest.approx(100 * 0.25 / 0.3)
    assert first_passage(means, 0.6) == pytest.approx(450)
    assert first_passage(means, 0.75) is None and first_passage(means, 0.05) == 0


def test_ratios_are_paired_by_seed_and_a_missed_target_is_a_lower_bound():
    base = [0.1, 0.1, 0.3, 0.5, 0.5, 0.5]  # a1 = 0.5: the target is 0.46
    rows = [row("grpo", 0, base), row("grpo", 1, base, step=200)]
    rows += [row("arm", 0, base, step=50), row("arm", 1, [0.1] * 6, step=200)]
    rows += [row("grpo", 2, [0.3, 0.2, 0.2]), row("arm", 2, base)]  # no gain, so no target
    assert tokens_report.targets(rows) == pytest.approx({0: 0.46, 1: 0.46})
    ratios = tokens_report.ratios(rows)
    assert [x.cost for x in ratios["grpo"]] == [1, 1]
    usual = cost_to_stay(means_of_evaluations(tokens_report.by_tokens(rows[1])), 0.46).cost
    assert ratios["arm"] == [
        (pytest.approx(0.5), True, True),
        (pytest.approx(1000 / usual), False, True),
    ]
    minutes = tokens_report.ratios(rows, minutes=True)["arm"]
    assert minutes[0] == (pytest.approx(1), True, True)
    text = tokens_report.report(rows, "4 x 4")
    assert "| arm | 3 | > " in text and "[1] |" in text and "is as planned" not in text
    planned = tokens_report.report(rows[:4], "4 x 4")
    assert "The task is as planned: accuracy before RL 0.100" in planned


def test_a_baseline_that_misses_its_own_target_is_an_upper_bound():
    """Its last accuracy is low and weighs more in a window of tokens than in a mean of three."""
    base, better, worse = [0.1, *[0.5] * 6, 0.3], [0.1, *[0.5] * 7], [0.1] * 8
    rows = [row("grpo", 0, base), row("arm", 0, better), row("worse", 0, worse)]
    assert tokens_report.ratios(rows)["arm"][0].baseline_reached
    ratios = tokens_report.ratios(rows, smooth=tokens_report.over_window)
    assert [(x.reached, x.baseline_reached) for (x,) in ratios.values()] == [
        (False, False),
        (True, False),
        (False, False),
    ]
    arm, worse = tokens_report.report(rows, "4 x 4", planned=False).splitlines()[-2:]
    assert "| < 0." in arm and "[0, GRPO 1] |" in arm and "| ? 1.00" in worse


def test_means_over_equal_tokens_do_not_depend_on_the_number_of_evaluations():
    """A line from 0 to 1 over 1,000,000 tokens has the same cost whether it is evaluated 4 or 40
    times, if means are taken over a window of tokens; means of evaluations lag by one evaluation.
    """
    few, many = ([i / n for i in range(n + 1)] + [1.0] * n for n in (4, 40))
    rows = [row("grpo", 0, many, step=25_000), row("arm", 0, few, step=250_000)]
    ratios = tokens_report.ratios(rows, smooth=tokens_report.over_window)["arm"]
    assert ratios == [(pytest.approx(1.0, abs=0.01), True, True)]
    assert tokens_report.ratios(rows)["arm"][0].cost > 1.2


def test_means_over_a_width_are_those_of_the_line_between_the_points():
    line = means_over([[0, 0.0], [1e6, 1.0], [2e6, 1.0]], 40_000)
    assert cost_to_stay(line, 0.5) == (pytest.approx(5e5, rel=1e-3), True)
    assert line[0][1] == pytest.approx(0.01, abs=1e-3)  # the left half of the window is empty
    assert line[500] == [pytest.approx(1e6), pytest.approx(1 - 0.02 / 4, abs=1e-3)]
    assert cost_to_stay(means_over([[0, 0.0], [1e6, 0.4]], 40_000), 0.5) == (1e6, False)
    assert means_over([[0.0, 0.3]], 10) == [[0.0, 0.3]] and target_of([[0.0, 0.3]]) is None


def test_the_interval_is_that_of_all_resamples():
    values = [0.5, 1.0, 2.0]
    interval = tokens_report.interval([Ratio(x, True, True) for x in values])
    means = [math.exp(np.log(x).mean()) for x in itertools.product(values, repeat=3)]
    assert interval.mean == pytest.approx(1)
    assert (interval.low, interval.high) == pytest.approx(tuple(np.percentile(means, (2.5, 97.5))))
    many = tokens_report.interval([Ratio(x, True, True) for x in np.linspace(0.5, 2.0, 8)])
    assert many.low < many.mean < many.high
    assert all(math.isnan(x) for x in tokens_report.interval([]))


TRIALS = [(arm, trial) for arm, one in experiment.ARMS.items() for trial in one.trials]


@pytest.mark.parametrize("smoke", [True, False])
def test_every_trial_is_a_configuration_that_may_run(smoke, tmp_path):
    scale = experiment.SMOKE if smoke else experiment.FULL
    base = experiment.base_config(0, tmp_path, smoke)
    for (arm, trial), cell in itertools.product(TRIALS, scale.cells):
        config = experiment.sized(base, experiment.Cell(*cell, experiment.RATE), scale)
        rl = experiment.ARMS[arm].trials[trial](config.rl)
        dataclasses.replace(config, rl=rl).validate_for_rl()
        prompts = cell[0] // 2 if "half the prompts" in trial else cell[0]
        assert rl.prompts_per_step == prompts and rl.total_updates == rl.steps
    assert max(len(one.trials) for one in experiment.ARMS.values()) == experiment.FULL.trials
    assert len(experiment.FULL.cells) == 6 and len(experiment.FULL.rates) == 3


def test_drafts_have_a_few_prompts_of_each_length_and_the_same_held_out_ones(tmp_path):
    base = experiment.base_config(0, tmp_path / "cold", smoke=True)
    config = experiment.Experiment(tmp_path, tmp_path, smoke=True)._with_prompts(base, 5)
    every = train_prompts(base.data, load_tokenizer(base.data, base.model.vocab_size), 0, print)
    chosen = kept_prompts(every, config.data.keep_file)
    assert len(every) > 40 and chosen.tokens == 0
    assert set(Counter(x.label for x in chosen.prompts).values()) == {5}
    assert experiment.ARMS["drafts"].prompts == experiment.FEW_PROMPTS
    config.validate_for_rl()


@pytest.fixture
def stand_in(monkeypatch):
    """Replaces the training by one that ends sooner for some settings; returns the list of its
    runs.
    """
    run_dirs = []

    def train(config, start, minutes, budget):
        rl = config.rl
        speed = rl.group_size * (2 if rl.optim.learning_rate == 3e-4 else 1)
        speed += 20 * (rl.step_policy is not None and rl.step_policy.n0 == 4)
        speed *= 0.01 if rl.permute_rewards else 1
        run_dirs.append(config.run_dir)
        values = [start, *(min(0.9, start + 0.01 * speed * i) for i in range(1, 9))]
        return {k: v for k, v in row("", 0, values).items() if k not in ("phase", "variant",
                "name", "seed")}  # fmt: skip

    def seed(self, number):
        folder = self.cold_starts / f"seed{number}"
        return experiment.base_config(number, folder, self.smoke), 0.1

    monkeypatch.setattr(experiment, "_train", train)
    monkeypatch.setattr(experiment.Experiment, "_seed", seed)
    return run_dirs


def test_the_plan_tunes_then_runs_each_arm_once(stand_in, tmp_path, capsys):
    options = ["--out", str(tmp_path), "--cold-starts", str(tmp_path / "cold"), "--seeds", "0", "1"]
    options += ["--only", "screening", "rloo", "permuted"]
    experiment.main(options)
    rows = experiments.finished(tmp_path / "tokens_to_accuracy.jsonl")
    phases = {
        phase: [x for x in rows if x["phase"] == phase] for phase in {x["phase"] for x in rows}
    }
    counts = {phase: len(phase_rows) for phase, phase_rows in phases.items()}
    assert counts == {"cells": 6, "rates": 6, "trials of screening": 3, "arms": 8}
    assert {x["seed"] for x in phases["cells"]} == {100}
    assert {x["seed"] for x in phases["rates"]} == {101}
    assert all(" x 8, rate" in x["name"] for x in phases["rates"])  # the best cells
    names = {x["variant"]: x["name"] for x in phases["arms"]}
    assert names["grpo"].endswith("x 8, rate 0.0003") and "4 of 8" in names["screening"]
    assert names["permuted"].startswith("permuted, 4 of 8")  # the control of the best arm
    before = len(stand_in)
    assert before == sum(counts.values()) == len(set(stand_in))
    table = (tmp_path / "tokens_to_accuracy.md").read_text()
    experiment.main(options)
    assert len(stand_in) == before and (tmp_path / "tokens_to_accuracy.md").read_text() == table
    assert "| screening, 4 of 8" in table and table in capsys.readouterr().out
    assert (tmp_path / "tokens_to_accuracy.png").stat().st_size > 10_000


def test_a_run_of_another_process_is_waited_for_and_not_repeated(stand_in, tmp_path, monkeypatch):
    """A lock on the run's folder stands for the other process, which has written its row when it
    releases the lock.
    """
    monkeypatch.setattr(experiment, "WAIT_S", 0.05)
    shared = experiment.Experiment(tmp_path, tmp_path / "cold", smoke=True)
    cell = experiment.Cell(4, 4, experiment.RATE)
    runs = [("arms", seed, "grpo", "", cell) for seed in (0, 1)]
    other = tmp_path / "seed0" / "arms_grpo__4_x_4__rate_0.00015"
    with experiment.lock(other):
        assert shared.run(*runs[0]) is None and not stand_in
        worker = threading.Thread(target=lambda: results.extend(shared.all(runs)))
        results: list[dict] = []
        worker.start()
        while len(stand_in) < 1:
            time.sleep(0.01)
        line = {"phase": "arms", "variant": "grpo", "seed": 0, "tokens": 7}
        experiments.append(shared.file, line | {"name": "grpo, 4 x 4, rate 0.00015"})
    worker.join()
    assert [x["seed"] for x in results] == [0, 1] and results[0]["tokens"] == 7
    assert len(stand_in) == 1 and "seed1" in stand_in[0]
