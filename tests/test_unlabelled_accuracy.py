"""The measures of benchmarks/unlabelled_accuracy.py on curves whose passages are known."""

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.unlabelled_accuracy import CELLS, Cell, Experiment, Run, tuned
from benchmarks.unlabelled_accuracy import whole as whole_run
from benchmarks.unlabelled_report import (
    LEVELS,
    end_difference,
    fall,
    flat_fall,
    goal_of,
    passage,
    passed,
    ratio,
    report,
    score,
    smoothed,
)


def row(arm, seed, slope, end=0.3, phase="hard", most=0.3, minutes=2.0):
    """Accuracy rises from 0.1 by `slope` a thousand tokens up to `most`, over 160 thousand."""
    tokens = np.linspace(0, 160_000, 161)
    accuracy = np.minimum(0.1 + slope * tokens / 1000, most)
    curve = [[int(t), t / 160_000 * minutes, float(a)] for t, a in zip(tokens, accuracy)]
    return {
        "phase": phase,
        "task": "hard",
        "seed": seed,
        "arm": arm,
        "cell": CELLS[0].name,
        "curve": curve,
        "end": end,
        "hard_drawn": 0.5,
        "uniform": 0.7,
    }


def test_scores_are_the_tokens_or_minutes_to_the_levels():
    # linear up to the levels, where means over 13% of the tokens equal the curve, but for its start
    steady = row("grpo", 1, 0.00125, most=1.0)
    assert score(steady) == pytest.approx(1000 * 0.09 / 0.00125, rel=0.01)
    assert score(steady, 1) == pytest.approx(score(steady) / 160_000 * 2, rel=1e-6)
    assert score(row("grpo", 1, 0.0)) == 160_000  # never: the whole run


def test_passages_are_paired_with_the_baselines_of_the_seed():
    """GRPO gains 0.2 by 160 thousand tokens, another arm twice and four times as fast: a ratio of
    sqrt(1/2 x 1/4), whose interval has one degree of freedom.
    """
    rows = [row("grpo", seed, 0.00125) for seed in (310, 311)]
    rows += [row("candidate", 310, 0.0025), row("candidate", 311, 0.005)]
    goal = 0.1 + 0.9 * (smoothed(rows[0])[-1][1] - 0.1)
    usual, reached = passage(rows[0], rows[0], 0)
    assert reached and usual == pytest.approx((goal - 0.1) / 0.00125 * 1000, rel=0.02)
    of = ratio(rows, "hard", "candidate", 0)
    assert of.mean == pytest.approx(math.sqrt(1 / 8), rel=0.1) and of.missed == 0
    half = stats.t.ppf(0.975, 1) * math.log(2) / 2
    assert math.log(of.high / of.low) == pytest.approx(2 * half, rel=0.1)
    never = ratio([*rows[:2], row("slow", 310, 0.0001)], "hard", "slow", 0)
    assert never.missed == 1 and never.mean == pytest.approx(160_000 / usual, rel=1e-6)


def test_ends_and_falls():
    rows = [row("grpo", s, 0.001, end=e) for s, e in ((310, 0.2), (311, 0.3), (312, 0.4))]
    rows += [row("candidate", s, 0.002, end=e) for s, e in ((310, 0.25), (311, 0.33), (312, 0.47))]
    gains = np.array([0.05, 0.03, 0.07])
    assert end_difference(rows, "hard", "candidate") == pytest.approx(
        (gains.mean(), gains.std(ddof=1) / math.sqrt(3))
    )
    curve = [[x, 0.4 if 60 <= x <= 80 else 0.1] for x in range(161)]
    assert fall(curve) == pytest.approx(0.3, abs=0.02)
    noise = flat_fall(row("grpo", 1, 0.0), 480, np.random.default_rng(0))
    assert 0 < noise < 3 * math.sqrt(0.1 * 0.9 / 480)
    table = report(rows)
    assert "| candidate (" in table and "+0.050 ± 0.012" in table


def test_cold_starts_of_the_short_task_have_no_worked_solutions_of_hard_sums(tmp_path):
    experiment = Experiment(tmp_path, tmp_path / "rows.jsonl", smoke=True)
    cell = Cell(32, 3e-4, "cosine")
    run = Run("hard", "short", 310, "grpo", cell, lambda rl: rl)
    assert run.key == ("hard", "short", 310, "grpo", "32 x 4, 0.0003, cosine")
    worked = experiment.cold_config(run).sft.procedural
    whole = experiment.cold_config(run._replace(task="hard")).sft.procedural
    assert len(whole) - len(worked) == 3 and whole[: len(worked)] == worked


def test_a_run_that_ends_early_has_the_score_and_the_passage_of_the_whole_one():
    whole = row("recipe", 310, 0.0025)
    goal = whole["curve"][0][2] + LEVELS[-1]
    early = next(
        part
        for part in ({**whole, "curve": whole["curve"][:n]} for n in range(2, 162))
        if passed(part, goal)
    )
    assert early["curve"][-1][0] < 80_000
    assert score(early) == pytest.approx(score(whole), rel=0.01)
    assert score(early, 1) == pytest.approx(score(whole, 1), rel=0.01)
    base = row("grpo", 310, 0.00125)
    assert not passed(whole, goal_of({**base, "curve": [[0, 0.0, 0.1], [160_000, 2.0, 0.9]]}))


def test_the_setting_is_the_best_score_of_those_that_do_not_end_lower(tmp_path):
    """The first of four cells that are equally fast falls back by 0.03."""
    falling = Cell(16, 3e-4, "constant")

    class Made(Experiment):
        def all(self, runs):
            self.runs += runs
            speed = {3e-4: 0.01, 1.5e-4: 0.005, 7.5e-5: 0.0025}
            made = [row("grpo", run.seed, speed.get(run.cell.rate, 0.0)) for run in runs]
            for run, one in zip(runs, made, strict=True):
                if run.cell == falling:
                    one["curve"][100:] = [[t, m, a - 0.03] for t, m, a in one["curve"][100:]]
            return made

    experiment = Made(tmp_path, tmp_path / "rows.jsonl", smoke=False)
    experiment.runs = []
    assert tuned(experiment, "grpo") == Cell(16, 3e-4, "cosine")
    tried = {run.cell for run in experiment.runs if run.seed == 300}
    assert {x.rate for x in tried} == {7.5e-5, 1.5e-4, 3e-4, 6e-4}
    later = [run for run in experiment.runs if run.seed == 301]
    assert len(later) == 6 and all(run.ends is whole_run for run in later)
