"""The experiments on RL: their accounts by hand, their tasks, and a smoke run of each from nothing
to the table and the picture.
"""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import (
    alpha,
    alpha_outcome,
    objectives,
    rl_runs,
    synthetic_tasks,
    zero_variance_audit,
)
from compass_jax.records import Prompt
from compass_jax.rewards.checks import Check, build
from compass_jax.verifiers.kinds import length

STEPS = [
    {
        "waste/tokens_generated": 100.0,
        "waste/frac_verifier_signal": 0.5,
        "waste/frac_shaping_signal": 0.0,
        "waste/frac_entropy_signal": 0.2,
        "waste/frac_none": 0.3,
        "waste/filter_tokens": 50.0,
    },
    {
        "waste/tokens_generated": 300.0,
        "waste/frac_verifier_signal": 1.0,
        "waste/frac_shaping_signal": 0.0,
        "waste/frac_entropy_signal": 0.0,
        "waste/frac_none": 0.0,
        "waste/filter_tokens": 50.0,
        "eval/heldout/avg_at_k": 0.4,
    },
    {
        "waste/tokens_generated": 50.0,
        "waste/frac_verifier_signal": 0.0,
        "waste/frac_shaping_signal": 1.0,
        "waste/frac_entropy_signal": 0.0,
        "waste/frac_none": 0.0,
        "waste/filter_tokens": 50.0,
    },
]


def test_every_token_is_counted_once_filter_rollouts_under_nothing():
    found = rl_runs.accounts(STEPS, 0.1, 0.6)
    assert found["tokens"] == 500 and found["filter_tokens"] == 50
    assert found["shares"] == pytest.approx(
        {"verifier_signal": 0.7, "shaping_signal": 0.1, "entropy_signal": 0.04, "none": 0.16}
    )
    assert found["curve"] == [[50, 0.1], [450, 0.4], [500, 0.6]]


def test_tokens_to_reach_an_accuracy_are_interpolated_at_the_first_passing():
    curve = [[100, 0.2], [200, 0.4], [300, 0.3], [400, 0.7]]
    assert rl_runs.tokens_to_reach(curve, 0.3) == pytest.approx(150) and rl_runs.tokens_to_reach(
        curve, 0.5
    ) == pytest.approx(350)
    assert (
        rl_runs.tokens_to_reach(curve, 0.71) is None
        and rl_runs.tokens_to_reach([[100, 0.2], [200, 0.2]], 0.2) == 200
    )


def test_the_mean_height_of_a_curve_weighs_by_tokens():
    curve = [[100, 0.0], [200, 0.4], [500, 0.4], [600, 0.0]]
    assert rl_runs.mean_height(curve, 500) == pytest.approx((0.2 * 100 + 0.4 * 300) / 400)
    assert rl_runs.mean_height(curve, 550) == pytest.approx(
        (0.2 * 100 + 0.4 * 300 + 0.3 * 50) / 450
    )


def test_the_prompt_set_has_as_many_prompts_of_each_kind():
    prompts = [Prompt(i, 0, "t", str(i), np.zeros(1, np.int32), "") for i in range(30)]
    rates = [(p, (0.0, 0.5, 1.0)[i % 3], 12) for i, p in enumerate(prompts)]
    rates[0] = (prompts[0], 0.0, 0)  # not looked at: of no kind
    chosen = zero_variance_audit.choose(rates, 20, seed=0)
    kinds = {
        kind: {i for i, k in chosen.items() if k == kind} for kind in zero_variance_audit.KINDS
    }
    assert [len(ids) for ids in kinds.values()] == [9, 9, 9] and 0 not in chosen
    assert all(
        {i % 3 for i in kinds[kind]} == {rest}
        for kind, rest in zip(zero_variance_audit.KINDS, (2, 0, 1), strict=True)
    )
    with pytest.raises(SystemExit, match="'mixed': 0"):
        zero_variance_audit.choose([rates[3], rates[5]], 5, seed=0)


@pytest.mark.parametrize("name", list(zero_variance_audit.VARIANTS))
def test_every_variant_is_a_configuration_that_may_run(name, tmp_path):
    config, _ = zero_variance_audit.base_config(0, tmp_path, smoke=False)
    changed = dataclasses.replace(config, rl=zero_variance_audit.VARIANTS[name][1](config.rl))
    zero_variance_audit.with_verifiers(changed, name).validate_for_rl()


def test_the_ensemble_tells_wrong_answers_apart_and_puts_none_above_a_right_one(tmp_path):
    config, _ = zero_variance_audit.base_config(0, tmp_path, smoke=False)
    changed = zero_variance_audit.with_verifiers(config, zero_variance_audit.ENSEMBLE)
    assert zero_variance_audit.with_verifiers(config, "all") is config
    for source in changed.data.sources:
        weights, given = dict(source.verifier), dict(source.verifier_args)
        found = [length.judge(text, **given) for text in ("3", "1 + 1 = 3 " * 9)]
        assert found == pytest.approx([1, 6 / 88])
        best_wrong, worst_right = weights["length"], weights["reasoning_gym"]
        assert best_wrong <= changed.rewards.wrong_at < changed.rewards.right_at <= worst_right


@pytest.mark.parametrize("name", list(objectives.VARIANTS))
def test_every_objective_is_a_configuration_that_may_run(name, tmp_path):
    config = objectives.task_config("decisions", 0, tmp_path, smoke=False)
    assert (
        objectives.with_objective(config, "weights", name, tmp_path).validate_for_rl().rl.objective
        == objectives.VARIANTS[name]
    )


@pytest.mark.parametrize("name", list(alpha_outcome.VARIANTS))
def test_every_alpha_is_a_configuration_that_may_run(name, tmp_path):
    task, size, value = alpha_outcome.VARIANTS[name]
    config = alpha_outcome.start_config(task, size, 0, tmp_path, smoke=False)
    found = alpha_outcome.with_alpha(config, "weights", value, tmp_path).validate_for_rl()
    assert found.rl.objective.alpha == value and found.rl.updates_per_rollout > 1
    assert (found.model.layers, found.model.hidden) == alpha.SIZES[size]


@pytest.mark.parametrize("task", ["decisions", "noise"])
def test_a_synthetic_task_is_what_it_says(task, tmp_path):
    """The reference of every prompt follows from the table; the cold start's letters have the
    frequencies that make the task.
    """
    files, table = synthetic_tasks.write(task, tmp_path, seed=3), synthetic_tasks.secret(3)
    again = synthetic_tasks.write(task, tmp_path / "again", seed=3)
    assert [f.read_bytes() for f in files] == [f.read_bytes() for f in again]
    assert sorted(table.values()) == sorted("wxyz" * 3) and len(table) == 12
    prompts = [json.loads(line) for line in files.prompts.read_text().splitlines()]
    check = build(Check("math", "answer"), "answer")
    for prompt in prompts:
        signs = prompt["prompt"].removeprefix("Signs: ").split()
        letters = "".join(table[s] for s in signs)
        text = synthetic_tasks.response(task, "".join(signs), letters, np.random.default_rng(0))
        assert check(prompt, text).reward == 1
        if letters != letters[::-1]:
            wrong = text.replace(f"key {letters}", f"key {letters[::-1]}")
            assert check(prompt, wrong).reward == 0
    talks = [json.loads(line)["messages"] for line in files.examples.read_text().splitlines()]
    chosen = [
        (part.split(" is ")[0][-1], part.split(" is ")[1][0])
        for _, a in talks
        for part in a["content"].split(".")
        if " is " in part
    ]
    right = np.mean([table[sign] == letter for sign, letter in chosen])
    assert right == pytest.approx(1 / 4 if task == "decisions" else 1 / 8, abs=0.02)
    wrong = np.mean(
        [synthetic_tasks.wrong_letter(sign, table) == letter for sign, letter in chosen]
    )
    assert wrong == pytest.approx(1 / 4 if task == "decisions" else 7 / 8, abs=0.02)


@pytest.mark.slow
def test_smoke_of_the_zero_variance_audit(tmp_path, monkeypatch):
    """Two variants from nothing; a second call runs nothing and writes the same table."""
    args = ["--out", str(tmp_path), "--seeds", "0", "--only", "grpo", "filter", "--smoke"]
    zero_variance_audit.main(args)
    table = (tmp_path / "zero_variance.md").read_text()
    assert (
        "| grpo | 1 |" in table
        and "| filter | 1 |" in table
        and (tmp_path / "zero_variance.png").stat().st_size > 10_000
    )
    monkeypatch.setattr(rl_runs, "run_rl", lambda config: pytest.fail("nothing was left to run"))
    zero_variance_audit.main(args)
    assert (tmp_path / "zero_variance.md").read_text() == table


@pytest.mark.slow
def test_smoke_of_the_objectives(tmp_path, monkeypatch):
    args = [
        "--out",
        str(tmp_path),
        "--seeds",
        "0",
        "--only",
        "espo",
        "--tasks",
        "decisions",
        "--smoke",
    ]
    objectives.main(args)
    table = (tmp_path / "objectives.md").read_text()
    assert (
        "**decisions**" in table
        and "| espo | 1 |" in table
        and (tmp_path / "objectives_decisions.png").stat().st_size > 10_000
    )
    monkeypatch.setattr(rl_runs, "run_rl", lambda config: pytest.fail("nothing was left to run"))
    objectives.main(args)
    assert (tmp_path / "objectives.md").read_text() == table


@pytest.mark.slow
def test_smoke_of_the_calibration(tmp_path):
    """Both sizes on the smallest vocabulary; a second call measures nothing and writes the same
    table.
    """
    args = ["--out", str(tmp_path), "--vocabularies", "512", "--smoke"]
    alpha.main(args)
    table = (tmp_path / "alpha.md").read_text()
    assert (
        all(f"| {size} | 512 |" in table for size in alpha.SIZES)
        and (tmp_path / "alpha.png").stat().st_size > 10_000
    )
    lines = (tmp_path / "alpha.jsonl").read_text()
    alpha.main(args)
    assert (tmp_path / "alpha.jsonl").read_text() == lines and (
        tmp_path / "alpha.md"
    ).read_text() == table


@pytest.mark.slow
def test_smoke_of_alpha_and_outcome(tmp_path, monkeypatch):
    """One alpha from nothing; a second call runs nothing and writes the same table."""
    name = "decisions, 2 layers of 64, 0.02"
    args = ["--out", str(tmp_path), "--seeds", "0", "--only", name, "--smoke"]
    alpha_outcome.main(args)
    table = (tmp_path / "alpha_outcome.md").read_text()
    assert "| decisions | 2 layers of 64 | 0.02 | 1 |" in table
    assert (tmp_path / "alpha_outcome.png").stat().st_size > 10_000
    monkeypatch.setattr(rl_runs, "run_rl", lambda config: pytest.fail("nothing was left to run"))
    alpha_outcome.main(args)
    assert (tmp_path / "alpha_outcome.md").read_text() == table
