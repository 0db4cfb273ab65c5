"""The demo's configurations and sentences, and (slow) the full demo with a few updates."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from logged import lines
from tokenizers import Tokenizer

from compass_jax.commands import demo
from compass_jax.commands.parsing import parse
from compass_jax.config.io import read_config
from compass_jax.experience.paired import read_summary
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.runs.report import ReportError
from compass_jax.weights.hf_config import read_hf_config


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


METRICS = {"waste/tokens_generated": [400.0, 600.0], "response_length/mean": [10.0, 15.0]}


def write_metrics(folder, steps):
    folder.mkdir(exist_ok=True)
    rows = []
    for i in range(steps):
        metrics = {name: x[i % 2] for name, x in METRICS.items()}
        rows.append({"step": i + 1, "stage": "rl", "metrics": metrics})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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


def arm(before, after, accuracies=(), tokens=1000, seconds=6.0, no_signal=0.75):
    """Returns a run of ten steps with an evaluation in each of the first ones."""
    steps = np.arange(1, 11)
    series = {
        "waste/tokens_generated": (steps, np.full(10, float(tokens))),
        "waste/frac_none": (steps, np.full(10, no_signal)),
        "time/step_s": (steps, np.full(10, seconds)),
        "eval/heldout/avg_at_k": (steps[: len(accuracies)], np.array(accuracies, float)),
    }
    return demo.Arm(series, before, after)


def line(start, end, steps):
    """Returns the accuracies of nine steps that rise in a line for `steps` and then stay."""
    return [min(end, start + (end - start) * i / steps) for i in range(1, 10)]


RUN = arm(0.2, 0.6, line(0.2, 0.6, 4), no_signal=0.25)


def test_the_three_sentences_name_the_accuracy_the_costs_and_the_share_that_taught():
    """The run rises from 0.2 to 0.6 in 4 of 10 steps, GRPO in 8. The means over a quarter of the
    tokens (1,250 to each side) are at the end value that much later than the curves.
    """
    grpo = arm(0.2, 0.6, line(0.2, 0.6, 8), seconds=12.6)
    accuracy, cost, taught = demo.results(RUN, grpo, 40, 2)
    assert accuracy == (
        "On 40 held-out prompts the model's accuracy (avg@2) was 0.200 before RL and is 0.600"
        " after it."
    )
    assert cost == (
        "An accuracy of 0.600 (a mean over 25% of the tokens) took this run 5,250 tokens and 0.5"
        " minutes, and plain GRPO 9,250 tokens and 1.9 minutes."
    )
    assert taught == (
        "Of this run's 10,000 tokens 75% taught (they had a training signal), of plain GRPO's"
        " 10,000 tokens 25%."
    )


def test_the_share_that_taught_is_of_tokens_and_not_of_steps():
    run = arm(0.2, 0.6)
    run.series["waste/tokens_generated"][1][:] = [9100] + [100] * 9
    run.series["waste/frac_none"][1][0] = 0.0
    assert "Of this run's 10,000 tokens 93% taught" in demo.results(run, RUN, 40, 2)[2]


def test_grpo_that_never_has_the_accuracy_is_told_with_what_it_reached():
    """The best mean of GRPO is that of its plateau."""
    grpo = arm(0.2, 0.3, line(0.2, 0.4, 4)[:8], tokens=1100)
    assert demo.cost_sentence(RUN, grpo) == (
        "An accuracy of 0.600 (a mean over 25% of the tokens) took this run 5,250 tokens and 0.5"
        " minutes; plain GRPO never had it and reached 0.400 with 11,000 tokens and 1.0 minutes."
    )


@pytest.mark.parametrize("after", [0.2, 0.1])
def test_a_run_without_a_gain_has_no_costs_to_compare(after):
    run = arm(0.2, after, line(0.2, after, 4))
    assert demo.cost_sentence(run, arm(0.2, 0.6, line(0.2, 0.6, 4))) == (
        "This run gained no accuracy to compare costs at, and plain GRPO reached 0.600 with 10,000"
        " tokens and 1.0 minutes."
    )


def test_a_missing_metric_is_named_and_the_other_sentences_stand():
    def without(name):
        return RUN._replace(series={x: y for x, y in RUN.series.items() if x != name})

    whole = demo.results(RUN, RUN, 40, 2)
    for name, places in (("waste/tokens_generated", {1, 2}), ("waste/frac_none", {2})):
        for pair in ((without(name), RUN), (RUN, without(name))):
            sentences = demo.results(*pair, 40, 2)
            assert {i for i in range(3) if sentences[i] != whole[i]} == places
            for i in places:
                assert "is not known" in sentences[i] and name in sentences[i]
    cost = demo.cost_sentence(RUN, without("time/step_s"))
    assert cost.endswith("and plain GRPO 5,250 tokens (its minutes were not logged).")


def test_numbers_that_are_not_finite_are_not_known():
    unknown = RUN._replace(before=math.nan)
    accuracy, cost, taught = demo.results(unknown, RUN, 40, 2)
    assert "was not known before RL and is 0.600 after it" in accuracy
    assert "is not known: an accuracy is missing" in cost and "75% taught" in taught
    steps, tokens = RUN.series["waste/tokens_generated"]
    cut = {"waste/tokens_generated": (steps, np.where(steps == 3, np.nan, tokens))}
    assert "is not known" in demo.taught_sentence(RUN._replace(series=RUN.series | cut), RUN)


def test_an_evaluation_without_a_number_is_no_point_of_the_curve():
    series = {
        "waste/tokens_generated": (np.array([1, 2, 3]), np.array([10.0, 20.0, 30.0])),
        "eval/heldout/avg_at_k": (np.array([1, 2]), np.array([math.nan, 0.4])),
    }
    assert demo.Arm(series, 0.1, 0.5).curve() == [[0.0, 0.1], [30.0, 0.4], [60.0, 0.5]]


def test_the_last_lines_name_the_page_and_commands_that_the_package_knows(tmp_path):
    text = demo.last_lines(tmp_path, tmp_path / "rl" / "page.html")
    assert f"{tmp_path}/rl/page.html" in text
    commands = [words.split() for words in text.splitlines() if words.startswith("  compass ")]
    assert [words[1] for words in commands] == ["show", "compare", "serve"]
    options = {"show": ["--varied"]}
    for _, name, *words in commands:
        rest = words[: words.index("#")]
        places = [x for x in rest if x.startswith(str(tmp_path))]
        parse(name, [*places, *options.get(name, [])])


def test_the_start_is_read_from_its_evaluation(tmp_path):
    labels = {"easy": [30, 0.5, 0.6], "hard": [10, 0.1, 0.0]}
    summary = {"k": 4, "prompts": 40, "unscored": 0, "avg_at_k": 0.4, "pass_at_k": 0.7}
    summary |= {"labels": labels, "greedy": None}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    start = read_summary(tmp_path)
    assert (start.k, start.prompts, start.avg_at_k) == (4, 40, 0.4) and math.isnan(start.greedy)
    assert start.labels == {name: tuple(x) for name, x in labels.items()}
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ReportError, match="no summary of an evaluation"):
        read_summary(tmp_path)


def tokens_of(directory):
    """Returns the generated tokens of a run."""
    return sum(row["metrics"]["waste/tokens_generated"] for row in lines(directory))


def ids_of(folder):
    """Returns the number of ids of a folder's tokenizer."""
    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()


@pytest.mark.slow
def test_the_quick_demo_ends_with_three_sentences_an_export_and_a_page(tmp_path, capsys):
    summary = demo.run_demo(str(tmp_path), seed=3, quick=True)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["heldout_prompts"] == 64
    for name in ("sft_avg_at_2", "rl_avg_at_2", "grpo_avg_at_2"):
        assert 0 <= summary[name] <= 1
    run_tokens, grpo_tokens = (tokens_of(tmp_path / name) for name in ("rl", "grpo"))
    # GRPO ends with the step that reaches the run's tokens, or with its last step.
    last_step = len(lines(tmp_path / "grpo")) == read_config(tmp_path / "grpo").rl.steps
    assert 0 < run_tokens <= grpo_tokens or last_step
    assert 0.8 * run_tokens < grpo_tokens < 1.5 * run_tokens
    exported = Path(summary["hf_dir"])
    model, ids = demo.demo_configs(tmp_path, 3)[1].model, ids_of(exported)
    # the export leaves out vocabulary rows without an id
    assert read_hf_config(exported) == dataclasses.replace(model, vocab_size=ids)
    assert Path(summary["page"]).stat().st_size > 20_000
    output = capsys.readouterr().out
    accuracy, cost, taught = summary["sentences"]
    assert f"{summary['sft_avg_at_2']:.3f} before RL" in accuracy and "plain GRPO" in cost
    assert f"Of this run's {run_tokens:,.0f} tokens" in taught
    assert "\n".join(summary["sentences"]) + "\nreport page of both runs: " in output
    assert summary["page"] in output and "next:\n  compass show" in output
    # a second call only reads the finished demo
    repeat = demo.run_demo(str(tmp_path), seed=3, quick=True)
    assert repeat["rl_avg_at_2"] == summary["rl_avg_at_2"]
