"""The table that recipes can beat."""

import dataclasses

import pytest

from benchmarks import leaderboard
from benchmarks.leaderboard import SEEDS, markdown, row_of, within_rules
from benchmarks.unlabelled_accuracy import RECIPE, optim
from benchmarks.unlabelled_report import BUDGET
from compass_jax.config import ConfigError, RLConfig, RLStage
from compass_jax.config.named import load
from compass_jax.data.predictors.label import Label
from compass_jax.experience.step_policies.screening import Screening

BASE = RLConfig(steps=100, prompts_per_step=16, group_size=4, eval_every=8, save_every=0)


def test_a_recipe_changes_the_method_and_neither_budget_nor_evaluations():
    def recipe(rl):
        return dataclasses.replace(
            rl, group_size=8, steps=10**6, eval_every=1, save_every=3, step_policy=Screening(n0=2)
        )

    rl = within_rules(recipe)(BASE)
    assert rl.group_size == 8 and rl.step_policy == Screening(n0=2)
    # a step costs twice as many tokens
    assert (rl.steps, rl.eval_every, rl.save_every) == (50, 4, 0)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (lambda rl: None, "returned a NoneType"),
        (lambda rl: dataclasses.replace(rl, stages=(RLStage(),)), "leave them out"),
    ],
)
def test_what_is_no_recipe_is_refused(recipe, message):
    with pytest.raises(ConfigError, match=message):
        within_rules(recipe)(BASE)


def runs(arm, slope):
    """Accuracy rises from 0.1 by `slope` a thousand tokens up to 0.3."""
    tokens = range(0, 161_000, 1000)
    curve = [[t, t / 80_000, min(0.1 + slope * t / 1000, 0.3)] for t in tokens]
    common = {"phase": "hard", "task": "hard", "arm": arm, "cell": "", "commit": "c" * 40}
    return [{**common, "seed": seed, "curve": curve, "end": 0.3 + slope} for seed in SEEDS]


def test_rows_are_ratios_to_grpo_and_the_fewest_tokens_come_first():
    rows = [*runs("grpo", 0.002), *runs("half", 0.004), *runs("slow", 0.0001)]
    half, slow = (row_of(rows, arm, arm, "f") for arm in ("half", "slow"))
    assert half["tokens"][0] == pytest.approx(0.5, abs=0.06) and half["tokens"][3] == 0
    assert slow["tokens"][3] == 3 and half["end"] == pytest.approx([0.002, 0.0], abs=1e-9)
    lines = markdown([slow, half]).splitlines()
    assert lines[2].startswith("| half | 0.") and lines[3].startswith("| slow | > ")
    assert "cccccccc |" in lines[2]
    with pytest.raises(ConfigError, match="no run of seed 310"):
        row_of(runs("grpo", 0.002), "half", "half", "f")


def test_the_table_is_printed_without_a_recipe(tmp_path, capsys):
    leaderboard.main(["--results", str(tmp_path / "rows.jsonl")])
    assert capsys.readouterr().out.startswith("| recipe | tokens | minutes |")


def test_the_example_is_the_recipe_that_was_measured():
    rl = dataclasses.replace(BASE, predictor=Label())
    measured = optim(schedule="cosine", schedule_tokens=BUDGET)(RECIPE(rl))
    assert load("examples/recipe.py:recipe", "--recipe")(rl) == measured != rl
