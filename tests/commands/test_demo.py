"""The demo's summary, and (slow) the full demo with a few updates."""

import dataclasses
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer

from compass_jax.commands import demo
from compass_jax.commands.parsing import parse
from compass_jax.config.io import read_config
from compass_jax.experience.evaluate import Evaluation
from compass_jax.experience.paired import read_summary
from compass_jax.report import ReportError, summary_table
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.weights.hf_config import read_hf_config


def evaluation(shift):
    labels = {"easy": (30, 0.5 + shift, 0.6 + shift), "hard": (10, 0.1 + shift, 0.0)}
    return Evaluation(4, 40, 0.4 + shift, 0.7, 0.45 + shift, 0, labels)


def test_the_table_has_a_row_for_each_difficulty_and_one_for_all():
    rows = demo.difficulty_rows(evaluation(0.0), evaluation(0.25))
    assert [row["task"] for row in rows] == ["easy", "hard", "all"] and [
        row["prompts"] for row in rows
    ] == [30, 10, 40]
    assert (rows[0]["SFT avg@4"], rows[0]["RL avg@4"], rows[1]["RL greedy"]) == (0.5, 0.75, 0.0)
    assert (rows[2]["SFT avg@4"], rows[2]["RL avg@4"], rows[2]["RL greedy"]) == (0.4, 0.65, 0.7)


def test_both_runs_share_everything_but_their_place_and_start(tmp_path):
    sft, rl = demo.demo_configs(tmp_path, 7, demo.Quick(3, 5, 2, 512))
    assert (sft.seed, rl.seed, sft.sft.steps, rl.rl.steps) == (7, 7, 3, 5)
    assert (
        rl.init_from == sft.run_dir == str(tmp_path / "sft")
        and rl.run_dir == str(tmp_path / "rl")
        and sft.data == rl.data
    )
    rl.validate_for_rl()
    moe = rl.model.moe
    assert moe.experts >= 8 and moe.top_k == 2 and rl.model.layers >= 4 and rl.rl.replay == "R3"
    assert rl.rl.step_policy.n0 == 2 < rl.rl.group_size and rl.rl.zero_variance.posterior


METRICS = {
    "waste/tokens_generated": [400.0, 600.0],
    "response_length/mean": [10.0, 15.0],
    "groups/varied_frac": [0.75, 0.75],
    "waste/frac_verifier_signal": [0.5, 1.0],
    "waste/frac_shaping_signal": [0.25, 0.0],
    "waste/frac_entropy_signal": [0.25, 0.0],
    "waste/frac_none": [0.0, 0.0],
}


def write_metrics(folder, steps):
    folder.mkdir(exist_ok=True)
    lines = []
    for i in range(steps):
        metrics = {name: x[i % 2] for name, x in METRICS.items()}
        if i == 0:
            metrics["eval/heldout/avg_at_k"] = 0.6  # one evaluation within the run
        lines.append({"step": i + 1, "stage": "rl", "metrics": metrics})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_baseline_has_the_same_start_and_data_and_is_plain_grpo(tmp_path):
    rl = demo.demo_configs(tmp_path, 7)[1]
    write_metrics(tmp_path / "rl", 40)
    baseline = demo.baseline_config(rl)
    baseline.validate_for_rl()
    for name in ("seed", "model", "data", "rewards", "init_from", "rollout", "compute"):
        assert getattr(baseline, name) == getattr(rl, name), name
    for name in ("prompts_per_step", "group_size", "updates_per_rollout", "optim", "buckets"):
        assert getattr(baseline.rl, name) == getattr(rl.rl, name), name
    assert (baseline.rl.objective, baseline.rl.replay) == (Grpo(), "off")
    assert baseline.rl.step_policy is None
    zero = baseline.rl.zero_variance
    assert not (zero.rl_zvp or zero.posterior or zero.grow_to or zero.dynamic_sampling)
    # 40 samples a step, and 16 x 4 of the baseline, with some steps to spare
    assert baseline.rl.steps == math.ceil(1.15 * 40 * 40 / 64)
    assert (rl.rl.eval_every, baseline.rl.eval_every) == (8, 5)
    assert (baseline.evaluation.start, rl.evaluation.start) == (False, True)
    assert baseline.evaluation.k == rl.evaluation.k


def test_the_baseline_ends_with_the_step_that_reaches_the_tokens_of_the_run(tmp_path):
    rl = demo.demo_configs(tmp_path, 7)[1]
    write_metrics(tmp_path / "rl", 4)  # 2,000 tokens
    enough = demo._spent_as_much(rl.directory, demo.baseline_config(rl).directory)
    assert not enough()  # the baseline has no metrics yet
    reached = []
    for steps in range(1, 6):
        write_metrics(tmp_path / "grpo", steps)
        reached.append(enough())
    assert reached == [False, False, False, True, True]


def write_answers(folder, right):
    """Writes an evaluation of ten prompts, of which the first `right` are solved."""
    folder.mkdir(parents=True)
    settings = {"right_at": 1.0, "top_k": 0}
    one = {"k": 2, "temperature": 1.0}
    summary = {"settings": settings, "sets": {"heldout": one}}
    (folder / "summary.json").write_text(json.dumps(summary))
    for i in range(10):
        samples = [{"outcome": "ok", "reward": float(i < right)}] * 3
        row = {"set": "heldout", "id": i, "prompt": str(i), "samples": samples}
        with open(folder / "answers.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")


@pytest.mark.parametrize(("steps", "title"), [(2, "at equal generated tokens"), (3, "40% more")])
def test_the_end_shows_both_runs_on_one_screen_and_the_difference_of_their_answers(
    tmp_path, steps, title
):
    rl = demo.demo_configs(tmp_path, 7)[1]
    write_metrics(tmp_path / "rl", 2)
    write_metrics(tmp_path / "grpo", steps)
    write_answers(tmp_path / "rl" / "evaluation", 7)
    write_answers(tmp_path / "grpo" / "evaluation", 6)
    directories = rl.directory, demo.baseline_config(rl).directory
    comparison = demo.against_grpo(*directories, evaluation(0.0), evaluation(0.3), evaluation(0.2))
    console = Console(width=80, file=io.StringIO())
    console.print(summary_table(comparison.rows, title=comparison.title))
    screen = console.file.getvalue()
    for text in (title, "0.400 -> 0.700", "0.400 -> 0.600"):
        assert text in screen
    # 0.4 at the start, 0.6 after 400 tokens, 0.7 or 0.6 (the baseline) after all
    ends = {"run": (1000, 0.7), "baseline": (1000 if steps == 2 else 1400, 0.6)}
    expected = demo.costs_to_target(
        *([[0, 0.4], [400, 0.6], [tokens, accuracy]] for tokens, accuracy in ends.values())
    )
    assert comparison.to_target == pytest.approx(expected) and expected["reached"]
    assert 0.5 < expected["ratio"] <= 1
    assert comparison.words.startswith("accuracy: 10.0 points above plain GRPO's")
    assert comparison.words.endswith("10 prompts, one seed): these prompts show no difference")


def line(tokens, accuracy, total):
    """Returns a curve from 0.1 to an accuracy, which it then keeps."""
    return [[0.0, 0.1], [float(tokens), accuracy], [float(total), accuracy]]


@pytest.mark.parametrize(
    ("run", "baseline", "words"),
    [
        (line(50_000, 0.5, 1e6), line(1e5, 0.5, 1e6), "; plain GRPO needed 1"),
        (line(1, 0.1, 2e5), line(9e4, 0.5, 1e6), "not reached with 200,000 tokens; plain GRPO"),
        (line(1e5, 0.5, 1e6), line(1, 0.1, 1e6), "plain GRPO gained nothing"),
    ],
)
def test_the_tokens_to_the_accuracy_of_plain_grpo(run, baseline, words):
    assert words in demo.target_in_words(demo.costs_to_target(run, baseline))


def test_the_ratio_is_that_of_the_tokens_where_the_means_stay_at_the_target():
    """One curve gains in a straight line over 400,000 of 1,000,000 tokens, the other over 800,000.
    The means over a quarter of the tokens follow the line, so that 90% of the gain takes at most
    90% of its tokens.
    """
    curves = [[[0.0, 0.0], [x, 1.0], [2e6, 1.0]] for x in (8e5, 1.6e6)]
    costs = demo.costs_to_target(*([[t / 2, a] for t, a in points] for points in curves))
    line_end = {"tokens": 4e5, "baseline_tokens": 8e5}
    for name, end in line_end.items():
        assert 0.85 * end < costs[name] <= end
    assert costs["reached"] and 0.5 <= costs["ratio"] < 0.55


def test_an_evaluation_without_a_number_is_no_point_of_the_curve():
    series = {
        "waste/tokens_generated": (np.array([1, 2, 3]), np.array([10.0, 20.0, 30.0])),
        "eval/heldout/avg_at_k": (np.array([1, 2]), np.array([math.nan, 0.4])),
    }
    assert demo.curve(series, 0.1, 0.5) == [[0.0, 0.1], [30.0, 0.4], [60.0, 0.5]]


def test_the_last_lines_name_the_page_and_commands_that_the_package_knows(tmp_path):
    summary = {"wall_s": 600.0, "peak_memory_bytes": 2**30}
    lines = demo.last_lines(tmp_path, tmp_path / "rl" / "page.html", summary)
    assert f"{tmp_path}/rl/page.html" in lines and "wall time: 10.0 min" in lines
    commands = [line.split() for line in lines.splitlines() if line.startswith("  compass ")]
    assert [words[1] for words in commands] == ["show", "compare", "serve"]
    options = {"show": ["--varied"]}
    for _, name, *words in commands:
        rest = words[: words.index("#")]
        places = [x for x in rest if x.startswith(str(tmp_path))]
        parse(name, [*places, *options.get(name, [])])


def test_the_start_is_read_from_its_evaluation(tmp_path):
    first = evaluation(0.0)
    labels = {name: list(x) for name, x in first.labels.items()}
    summary = {"k": 4, "prompts": 40, "unscored": 0, "avg_at_k": 0.4, "pass_at_k": 0.7}
    summary |= {"labels": labels}
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"greedy": None}))
    start = read_summary(tmp_path)
    assert (start.k, start.prompts, start.avg_at_k) == (4, 40, 0.4) and math.isnan(start.greedy)
    assert start.labels == first.labels
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ReportError, match="no summary of an evaluation"):
        read_summary(tmp_path)


def ids_of(folder):
    """Returns the number of ids of a folder's tokenizer."""
    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()


@pytest.mark.slow
def test_the_quick_demo_ends_with_a_summary_a_comparison_an_export_and_a_page(tmp_path, capsys):
    summary = demo.run_demo(str(tmp_path), seed=3, quick=True)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    expected = {"sft_avg_at_2", "rl_avg_at_2", "sft_greedy", "rl_greedy", "wall_s", "to_target"}
    assert expected <= summary.keys()
    assert summary["to_target"].keys() >= {"target"}
    assert summary["heldout_prompts"] == 64 and 0 <= summary["rl_avg_at_2"] <= 1
    rows = {row.pop(""): row for row in summary["against_grpo"]}
    run_tokens, grpo_tokens = (int(x.replace(",", "")) for x in rows["generated tokens"].values())
    # GRPO ends with the step that reaches the run's tokens, or with its last step.
    last_step = rows["steps"]["plain GRPO"] == str(read_config(tmp_path / "grpo").rl.steps)
    assert (
        0 < run_tokens <= grpo_tokens or last_step
    ) and 0.8 * run_tokens < grpo_tokens < 1.5 * run_tokens
    exported = Path(summary["hf_dir"])
    model, ids = demo.demo_configs(tmp_path, 3)[1].model, ids_of(exported)
    # the export leaves out vocabulary rows without an id
    assert read_hf_config(exported) == dataclasses.replace(model, vocab_size=ids)
    assert Path(summary["page"]).stat().st_size > 20_000
    output = capsys.readouterr().out
    assert ("fewer tokens" in output) == (grpo_tokens < 0.95 * run_tokens)
    assert summary["page"] in output and "next:\n  compass show" in output
    # a second call only reads the finished demo
    repeat = demo.run_demo(str(tmp_path), seed=3, quick=True)
    assert repeat["rl_avg_at_2"] == summary["rl_avg_at_2"]
