"""The demo's configurations and last screen, and (slow) the full demo with a few updates."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from logged import lines
from tokenizers import Tokenizer

from compass_jax.commands import demo
from compass_jax.commands.parsing import parse
from compass_jax.config import ZeroVarianceConfig
from compass_jax.data.predictors.text import Text
from compass_jax.experience.paired import read_summary
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.runs.report import ReportError
from compass_jax.weights.hf_config import read_hf_config


def test_the_rl_runs_share_the_start_the_data_and_the_step_size(tmp_path):
    sft, rl, grpo = demo.demo_configs(tmp_path, 7)
    for config in (rl, grpo):
        config.validate_for_rl()
    assert rl.init_from == grpo.init_from == sft.directory == str(tmp_path / "sft")
    for name in ("seed", "model", "data", "rewards", "rollout", "compute"):
        assert getattr(rl, name) == getattr(grpo, name), name
    for name in ("prompts_per_step", "group_size", "updates_per_rollout", "objective", "buckets"):
        assert getattr(rl.rl, name) == getattr(grpo.rl, name), name
    cosine, constant = rl.rl.optim, grpo.rl.optim
    assert (cosine.schedule, constant.schedule) == ("cosine", "constant")
    assert cosine == dataclasses.replace(
        constant, schedule="cosine", schedule_tokens=cosine.schedule_tokens
    )
    # one evaluation is the start of both
    assert grpo.evaluation == dataclasses.replace(rl.evaluation, start=False)


def test_the_run_is_the_measured_recipe_and_the_baseline_plain_grpo(tmp_path):
    """benchmarks/unlabelled_accuracy.py measured the recipe and tuned GRPO's step size."""
    rl, grpo = (config.rl for config in demo.demo_configs(tmp_path, 7)[1:])
    assert rl.zero_variance == ZeroVarianceConfig(posterior=True)
    assert (rl.predictor, rl.step_policy) == (Text(), Screening(n0=2))
    assert (rl.prompts_per_step, rl.group_size, rl.optim.learning_rate) == (16, 4, 1.5e-4)
    assert rl.optim.average == 0.95 and rl.replay == "R3"
    assert grpo.zero_variance == ZeroVarianceConfig() and grpo.step_policy is None
    assert (grpo.objective, grpo.replay) == (Grpo(), "off")


def test_rl_sees_one_label_and_the_cold_start_the_labels_of_its_tasks(tmp_path):
    sft, rl, _ = demo.demo_configs(tmp_path, 7)
    assert {source.label for source in rl.data.sources} == {"unlabelled"}
    labels = {source.label for source in sft.data.sources}
    assert len(labels) == len(sft.data.sources) == len(rl.data.sources)
    taught = {name for name, *_ in (*sft.sft.procedural, *sft.sft.answers)}
    assert taught == labels


def test_the_quick_demo_has_fewer_tokens_and_prompts(tmp_path):
    sft, rl, grpo = demo.demo_configs(tmp_path, 7, quick=True)
    assert (sft.sft.steps, rl.rl.optim.schedule_tokens) == (150, 5000)
    assert (rl.rl.eval_every, grpo.rl.eval_every, grpo.data.eval_prompts) == (2, 1, 64)


STEPS = 10


def curve(start, end, steps):
    """Returns accuracies after each step that rise in a line for `steps` and then stay."""
    return [min(end, start + (end - start) * i / steps) for i in range(1, STEPS + 1)]


def write_run(folder, start, accuracies, seconds, no_signal, tokens=(1000.0,) * STEPS):
    """Writes a run of ten steps with an evaluation after each but the last, and at both ends."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i, generated in enumerate(tokens):
        metrics = {"waste/tokens_generated": generated, "time/step_s": seconds}
        metrics["waste/frac_none"] = no_signal[i]
        if i < STEPS - 1:
            metrics["eval/heldout/avg_at_k"] = accuracies[i]
        rows.append({"step": i + 1, "stage": "rl", "metrics": metrics})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_summary(folder / "evaluation_start", start)
    write_summary(folder / "evaluation", accuracies[-1])


def write_summary(folder, accuracy, k=2):
    folder.mkdir(parents=True, exist_ok=True)
    summary = {"k": k, "prompts": 40, "unscored": 0}
    summary |= {"avg_at_k": accuracy, "pass_at_k": 0.7, "greedy": None}
    (folder / "summary.json").write_text(json.dumps(summary))


def finished(folder, run, grpo):
    """Writes a finished demo: the start at 0.2, curves of both runs, a fourth of the run's tokens
    and three fourths of plain GRPO's without a signal, and evaluations of their own.
    """
    write_run(folder / "rl", 0.2, run, 6.0, [0.25] * STEPS)
    write_run(folder / "grpo", 0.2, grpo, 12.0, [0.75] * STEPS)
    for name, accuracy in (("sft", 0.21), ("rl", 0.68), ("grpo", 0.59)):
        write_summary(folder / "evaluations" / name, accuracy, k=8)
    return folder


def test_the_last_screen_has_the_accuracies_the_costs_what_taught_and_the_page(tmp_path):
    """Plain GRPO rises from 0.2 to 0.6 in 8 steps and has 0.56, 90% of its gain, after 7.2 of them;
    the run rises from 0.2 to 0.7 in 5 and has it after 3.6.
    """
    results = demo.results(finished(tmp_path, curve(0.2, 0.7, 5), curve(0.2, 0.6, 8)))
    screen = demo.last_screen(Path("d"), results["sentences"], Path("d/rl/page.html"))
    assert screen.splitlines() == [
        "On 40 held-out prompts the model's accuracy (avg@8) was 0.210 before RL and is 0.680 after"
        " it; after plain GRPO it is 0.590.",
        "For 90% of its gain plain GRPO needed 7,200 tokens and 1.4 minutes, and this run 3,600"
        " tokens and 0.4 minutes.",
        "7,500 of this run's 10,000 tokens taught (they had a training signal), and 2,500 of plain"
        " GRPO's 10,000.",
        "report page of both runs: d/rl/page.html (open it in a browser)",
        "next:",
        "  compass show d/rl --varied   # best and worst answers of some groups",
        "  compass compare d/evaluations/grpo d/evaluations/rl   # prompt by prompt",
        "  compass serve d/hf   # an HTTP API: docs/serving.md",
    ]
    assert results["first_passage_tokens"] == pytest.approx({"rl": 3600, "grpo": 7200})
    accuracies = {"sft_avg_at_8": 0.21, "rl_avg_at_8": 0.68, "grpo_avg_at_8": 0.59}
    assert results.items() >= accuracies.items()


def test_tokens_that_taught_are_counted_in_each_step(tmp_path):
    """A step of 9,100 tokens has no token without a signal, nine of 100 have 25 each."""
    run = {"tokens": [9100.0] + [100.0] * 9, "no_signal": [0.0] + [0.25] * 9}
    write_run(tmp_path, 0.2, curve(0.2, 0.6, 4), 6.0, **run)
    assert demo.read_arm(tmp_path).taught == 9100 + 9 * 75


def test_a_run_that_never_has_plain_grpos_gain_is_told_with_its_whole_cost(tmp_path):
    folder = finished(tmp_path, curve(0.2, 0.5, 5), curve(0.2, 0.6, 8))
    results = demo.results(folder)
    assert results["sentences"][1] == (
        "For 90% of its gain plain GRPO needed 7,200 tokens and 1.4 minutes; this run did not get"
        " there with 10,000 tokens and 1.0 minutes."
    )
    assert results["first_passage_tokens"]["rl"] is None


@pytest.mark.parametrize("end", [0.2, 0.1])
def test_plain_grpo_without_a_gain_leaves_no_costs_to_compare(tmp_path, end):
    results = demo.results(finished(tmp_path, curve(0.2, 0.6, 5), curve(0.2, end, 8)))
    assert results["sentences"][1] == (
        "Plain GRPO gained no accuracy with 10,000 tokens and 2.0 minutes."
    )
    assert results["first_passage_tokens"] == {"rl": None, "grpo": None}


def test_an_evaluation_without_a_number_is_no_point_of_the_curve(tmp_path):
    accuracies = [0.3, math.nan, *[0.5] * 8]
    write_run(tmp_path, 0.2, accuracies, 6.0, [0.0] * STEPS)
    points = demo.read_arm(tmp_path).curve
    assert points[:3] == [[0.0, 0.2], [1000.0, 0.3], [3000.0, 0.5]]
    assert points[-1] == [10_000.0, 0.5]


def test_a_run_ends_with_the_step_that_reaches_its_tokens(tmp_path):
    enough, reached = demo._has_spent(str(tmp_path / "rl"), 4000), []
    assert not enough()  # the run has no metrics yet
    write_run(tmp_path / "rl", 0.2, [0.2] * STEPS, 6.0, [0.0] * STEPS)
    log = tmp_path / "rl" / "metrics.jsonl"
    rows = log.read_text().splitlines(keepends=True)
    for steps in range(1, 6):
        log.write_text("".join(rows[:steps]))
        reached.append(enough())
    assert reached == [False, False, False, True, True]


def test_the_last_commands_are_known_to_the_package(tmp_path):
    screen = demo.last_screen(tmp_path, [], tmp_path / "page.html")
    commands = [words.split() for words in screen.splitlines() if words.startswith("  compass ")]
    assert [words[1] for words in commands] == ["show", "compare", "serve"]
    for _, name, *words in commands:
        parse(name, words[: words.index("#")])


def test_accuracies_are_read_from_an_evaluation(tmp_path):
    write_summary(tmp_path, 0.4, k=4)
    start = read_summary(tmp_path)
    assert (start.k, start.prompts, start.avg_at_k, start.pass_at_k) == (4, 40, 0.4, 0.7)
    assert math.isnan(start.greedy) and start.unscored == 0
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
    for name in ("sft_avg_at_8", "rl_avg_at_8", "grpo_avg_at_8"):
        assert 0 <= summary[name] <= 1
    run_tokens, grpo_tokens = (tokens_of(tmp_path / name) for name in ("rl", "grpo"))
    # a run ends with the step that reaches its tokens
    for name, tokens in (("rl", run_tokens), ("grpo", grpo_tokens)):
        last = lines(tmp_path / name)[-1]["metrics"]["waste/tokens_generated"]
        assert tokens - last < demo.QUICK["rl.optim.schedule_tokens"] <= tokens
    exported = Path(summary["hf_dir"])
    model, ids = demo.demo_configs(tmp_path, 3)[1].model, ids_of(exported)
    # the export leaves out vocabulary rows without an id
    assert read_hf_config(exported) == dataclasses.replace(model, vocab_size=ids)
    assert Path(summary["page"]).stat().st_size > 20_000
    output = capsys.readouterr().out
    accuracy, cost, taught = summary["sentences"]
    assert f"{summary['sft_avg_at_8']:.3f} before RL" in accuracy and "lain GRPO" in cost
    assert f"of this run's {run_tokens:,.0f} tokens" in taught
    screen = demo.last_screen(tmp_path, summary["sentences"], Path(summary["page"]))
    assert output.rstrip().endswith(screen)
    # a second call only reads the finished demo
    repeat = demo.run_demo(str(tmp_path), seed=3, quick=True)
    assert repeat["rl_avg_at_8"] == summary["rl_avg_at_8"]
