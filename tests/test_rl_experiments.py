"""The experiments on RL: their accounting by hand, and their tasks."""

import json

import numpy as np
import pytest

from benchmarks import rl_runs, synthetic_tasks, zero_variance_audit
from compass_jax.base.records import Prompt
from compass_jax.rewards.checks import Check, build
from compass_jax.rewards.verifiers.kinds.texts import length

SHARES = ("verifier_signal", "shaping_signal", "entropy_signal", "none")


def step(tokens, *shares, **metrics):
    """Returns the metrics of a step."""
    waste = dict(zip(SHARES, shares, strict=True))
    fractions = {f"waste/frac_{name}": share for name, share in waste.items()}
    return {"waste/tokens_generated": tokens, "waste/filter_tokens": 50.0, **fractions, **metrics}


STEPS = [
    step(100.0, 0.5, 0.0, 0.2, 0.3),
    step(300.0, 1.0, 0.0, 0.0, 0.0, **{"eval/heldout/avg_at_k": 0.4}),
    step(50.0, 0.0, 1.0, 0.0, 0.0),
]


def test_every_token_is_counted_once_filter_rollouts_under_nothing():
    accounts = rl_runs.accounts(STEPS, 0.1, 0.6)
    assert accounts["tokens"] == 500 and accounts["filter_tokens"] == 50
    assert accounts["shares"] == pytest.approx(
        {"verifier_signal": 0.7, "shaping_signal": 0.1, "entropy_signal": 0.04, "none": 0.16}
    )
    assert accounts["curve"] == [[50, 0.1], [450, 0.4], [500, 0.6]]


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
    rates[0] = (prompts[0], 0.0, 0)  # no samples: it has no kind
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


def test_the_ensemble_tells_wrong_answers_apart_and_puts_none_above_a_right_one(tmp_path):
    config, _ = zero_variance_audit.base_config(0, tmp_path, smoke=False)
    changed = zero_variance_audit.with_verifiers(config, zero_variance_audit.ENSEMBLE)
    assert zero_variance_audit.with_verifiers(config, "all") is config
    for source in changed.data.sources:
        weights, arguments = dict(source.verifier), dict(source.verifier_args)
        scores = [length(text, **arguments) for text in ("3", "1 + 1 = 3 " * 9)]
        assert scores == pytest.approx([1, 6 / 88])
        best_wrong, worst_right = weights["length"], weights["reasoning_gym"]
        assert best_wrong <= changed.rewards.wrong_at < changed.rewards.right_at <= worst_right


@pytest.mark.parametrize("task", ["decisions", "noise"])
def test_a_synthetic_task_is_what_it_says(task, tmp_path):
    """The reference of every prompt follows from the secret table."""
    files, table = synthetic_tasks.write(task, tmp_path, seed=3), synthetic_tasks.secret(3)
    second_files = synthetic_tasks.write(task, tmp_path / "again", seed=3)
    assert [f.read_bytes() for f in files] == [f.read_bytes() for f in second_files]
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
