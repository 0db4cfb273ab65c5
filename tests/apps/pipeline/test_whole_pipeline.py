"""Whole pipelines, whose stages work in this process or in processes that are killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import quick_compile
from evolve import evolve
from tiny_pipeline import MADE, tiny_pipeline
from tiny_run import tiny_run

from compass_jax.apps.curate.merge_folders import RECORD
from compass_jax.apps.pipeline import results as pipeline_results
from compass_jax.apps.pipeline.results import markdown, results, rows
from compass_jax.apps.pipeline.run import run_pipeline
from compass_jax.apps.pipeline.stages import Pipeline, Stage
from compass_jax.apps.pipeline.work import evaluate, merge, prepare, sft
from compass_jax.apps.pipeline.work import rows as write_rows
from compass_jax.config import ConfigError
from compass_jax.config.prepare import PrepareConfig
from compass_jax.data.preferences import read_preferences

HERE = Path(__file__).parent


def test_rows_are_cleaned_learnt_merged_and_measured(tmp_path, monkeypatch):
    reported = []
    monkeypatch.setattr(
        pipeline_results, "run_report", lambda *arguments: reported.append(arguments[:2])
    )
    pipeline, run = Pipeline(tmp_path), evolve(tiny_run(), trackers=(), show_samples_every=0)
    asked = pipeline.add("asked", write_rows, function=f"{MADE}:asked", count=1)
    taught = pipeline.add("taught", write_rows, function=f"{MADE}:taught", count=8)
    settings = PrepareConfig((taught,), against=(asked,), similarity=0)
    clean = pipeline.add("clean", prepare, settings=settings)
    tuned = evolve(run, sft={"procedural": (), "files": (clean,), "steps": 1})
    base = pipeline.add("base", sft, run=tuned)
    parents = tuple(
        pipeline.add(name, sft, run=evolve(tuned, init_from=base)) for name in ("a", "b")
    )
    choices = {"density": (0.5,), "routers": "base"}
    merged = pipeline.add("merged", merge, base=base, parents=parents, **choices)
    pipeline.add("measured", evaluate, run=run, of={"merged": merged})

    def do(stage):
        if stage.name not in ("a", "b"):
            return stage.run()
        shutil.copytree(base, stage.output, dirs_exist_ok=True)
        return 0

    assert run_pipeline(pipeline, do=do) == 0
    train_rows = (tmp_path / "03-clean" / "train.jsonl").read_text().splitlines()
    assert len(train_rows) == 8 and "0 + 1" in train_rows[0]
    base_config = json.loads((tmp_path / "04-base" / "config.json").read_text())
    assert base_config["sft"]["files"] == [str(tmp_path / "03-clean" / "train.jsonl")]
    merged = json.loads((tmp_path / "07-merged" / "merged" / RECORD).read_text())
    assert [Path(model["folder"]).name for model in merged["models"]] == ["05-a", "06-b"]
    accuracies = json.loads((tmp_path / "results.json").read_text())["stages"]
    summary = json.loads((tmp_path / "08-measured" / "merged" / "summary.json").read_text())
    assert (
        accuracies == {"merged": summary["sets"]}
        and accuracies["merged"]["heldout"]["prompts"] == 4
    )
    assert "| merged |" in (tmp_path / "results.md").read_text()
    folders = [tmp_path / name for name in ("04-base", "05-a", "06-b")]
    assert reported == [(folders, str(tmp_path / "report.html"))]


def test_the_table_has_a_row_for_each_stage_and_a_column_for_each_set():
    accuracies = {
        "base": {"sums": {"avg_at_k": 0.25, "avg_at_k_se": 0.015}},
        "rl": {
            "sums": {"avg_at_k": 0.5, "avg_at_k_se": None},
            "prices": {"avg_at_k": None, "avg_at_k_se": None},
        },
    }
    assert rows(accuracies) == [
        {"stage": "base", "sums": "25.0 ± 1.5", "prices": ""},
        {"stage": "rl", "sums": "50.0", "prices": "unknown"},
    ]
    assert markdown(accuracies).splitlines()[:3] == [
        "| stage | sums | prices |",
        "| --- | --- | --- |",
        "| base | 25.0 ± 1.5 |  |",
    ]


def test_a_function_that_gives_no_row_is_refused(tmp_path):
    pipeline = Pipeline(tmp_path)
    pipeline.add("none", write_rows, function=f"{MADE}:none", count=1)
    with pytest.raises(ConfigError, match="none': it gave no row"):
        run_pipeline(pipeline, do=Stage.run)


def test_weights_that_were_measured_are_not_measured_again(tmp_path):
    pipeline = tiny_pipeline(str(tmp_path))
    stage = pipeline.stages[4]
    for name in ("base", "rl"):
        folder = stage.folder / name
        folder.mkdir(parents=True)
        text = json.dumps({"sets": {"sum": {"avg_at_k": 0.5, "avg_at_k_se": 0.1}}})
        (folder / "summary.json").write_text(text)
    assert stage.run() == 0
    assert list(results(pipeline)) == ["base", "rl"]


FILE = """
import sys
sys.path[:0] = {path!r}
import tiny_pipeline as tiny
def pipeline(folder):
    return tiny.{name}(folder)
"""


class Command:
    """The command `compass pipeline` on a tiny pipeline, running in a child process."""

    def __init__(self, out, name="tiny_pipeline"):
        file = out.parent / "tiny.py"
        file.write_text(FILE.format(path=[str(HERE), str(HERE.parents[1])], name=name))
        command = [sys.executable, "-m", "compass_jax", "pipeline", str(file), "--out", str(out)]
        environment = os.environ | {"XLA_FLAGS": quick_compile.FLAG}  # one device, few fusions
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        )

    def when(self, condition, number):
        """Sends a signal as soon as `condition()` holds; returns the exit status."""
        while self.process.poll() is None and not condition():
            time.sleep(0.02)
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.end()

    def end(self):
        _, stderr = self.process.communicate(timeout=600)
        print(stderr.decode())
        return self.process.returncode


def answers(out):
    """Returns the logs in which two runs must agree: every answer, and every metric except times,
    rates and memory.
    """
    contents = {}
    for file in sorted(out.rglob("*.jsonl")):
        if file.name in ("answers.jsonl", "train.jsonl", "pass_rates.jsonl", "rulings.jsonl"):
            contents[str(file.relative_to(out))] = file.read_text().replace(str(out), "")
    for file in sorted(out.rglob("metrics.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        clocks = ("_s", "_per_s", "_bytes", "mfu", "peak_gib")
        contents[str(file.relative_to(out))] = [
            {
                k: v
                for k, v in line["metrics"].items()
                if not k.endswith(clocks) and "time/" not in k
            }
            for line in lines
        ]
    return contents


@pytest.mark.slow
def test_a_pipeline_that_is_killed_goes_on_and_ends_as_an_undisturbed_one(tmp_path):
    (tmp_path / "left").mkdir()
    (tmp_path / "killed").mkdir()
    undisturbed, out = tmp_path / "left" / "out", tmp_path / "killed" / "out"
    assert Command(undisturbed).end() == 0
    step = out / "03-base" / "checkpoints"
    assert Command(out).when(lambda: any(step.glob("step_*")), signal.SIGKILL) == -9
    log = out / "04-rl" / "metrics.jsonl"
    assert Command(out).when(lambda: log.is_file() and log.stat().st_size, signal.SIGTERM) == 143
    assert (out / "results.json").exists() is False
    first_summary = out / "05-measured" / "base" / "summary.json"
    assert Command(out).when(first_summary.is_file, signal.SIGINT) == 130
    assert Command(out).end() == 0
    assert answers(out) == answers(undisturbed)
    actual, expected = (json.loads((x / "results.json").read_text()) for x in (out, undisturbed))
    assert actual == expected and list(actual["stages"]) == ["base", "rl"]
    assert (out / "06-exported" / "hf" / "config.json").is_file()


@pytest.mark.slow
def test_a_killed_pipeline_with_a_judge_goes_on_and_ends_as_an_undisturbed_one(tmp_path):
    """The pipeline is killed in its filter, in the fine-tuning of its judge, and in the RL that the
    judge rewards.
    """
    (tmp_path / "left").mkdir()
    (tmp_path / "killed").mkdir()
    undisturbed, out = tmp_path / "left" / "out", tmp_path / "killed" / "out"
    name = "judged_pipeline"
    assert Command(undisturbed, name).end() == 0
    rates = out / "07-kept" / "pass_rates.jsonl"
    assert Command(out, name).when(rates.is_file, signal.SIGKILL) == -9
    tuned = out / "08-judge" / "sft" / "checkpoints"
    assert Command(out, name).when(lambda: any(tuned.glob("step_*10")), signal.SIGTERM) == 143
    log = out / "09-rl" / "metrics.jsonl"
    assert Command(out, name).when(lambda: log.is_file() and log.stat().st_size, 9) == -9
    assert Command(out, name).end() == 0
    outputs = answers(out)
    assert outputs == answers(undisturbed)
    judged = [line for line in outputs["09-rl/metrics.jsonl"] if line["reward/unknown_frac"] < 1]
    assert judged and {"05-answered/train.jsonl", "07-kept/pass_rates.jsonl"} <= outputs.keys()
    shares = json.loads((out / "08-judge" / "judged_rl" / "summary.json").read_text())
    assert shares["judge"] == str(out / "08-judge" / "rl") and shares["judged"] > 0
    rl_config = json.loads((out / "09-rl" / "config.json").read_text())
    assert rl_config["rewards"]["judge"]["weights"] == str(out / "08-judge" / "rl")
    assert rl_config["data"]["keep_file"] == str(rates)
    mined = {
        pair.candidate: pair for pair in read_preferences(str(out / "10-mined" / "pairs.jsonl"))
    }
    groups = [json.loads(x) for x in (out / "09-rl" / "rollouts.jsonl").read_text().splitlines()]
    responses = {sample["response"] for group in groups for sample in group["samples"]}
    assert mined.keys() <= responses and {pair.gold for pair in mined.values()} <= {0, -1}
    second_judge_config = json.loads((out / "11-again" / "sft" / "config.json").read_text())
    assert second_judge_config["init_from"] == str(out / "08-judge" / "rl")
    assert second_judge_config["sft"]["preferences"][1] == str(out / "10-mined" / "pairs.jsonl")
    assert (out / "12-exported" / "hf" / "config.json").is_file()


def stepped(log):
    return log.is_file() and log.stat().st_size > 0


@pytest.mark.slow
def test_both_phases_of_the_papers_system_that_are_killed_end_as_undisturbed_ones(tmp_path):
    """The pipeline of `compass_max` is killed after the first step of each phase."""
    (tmp_path / "left").mkdir()
    (tmp_path / "killed").mkdir()
    undisturbed, out = tmp_path / "left" / "out", tmp_path / "killed" / "out"
    name = "paper_pipeline"
    assert Command(undisturbed, name).end() == 0
    logs = [out / phase / "metrics.jsonl" for phase in ("06-reasoning", "08-domain")]
    for log in logs:
        assert Command(out, name).when(partial(stepped, log), signal.SIGKILL) == -9
    assert Command(out, name).end() == 0
    outputs = answers(out)
    assert outputs == answers(undisturbed)
    for phase in ("06-reasoning", "08-domain"):
        steps = outputs[f"{phase}/metrics.jsonl"]
        assert len(steps) == 2 and all("espo/group_1/epsilon" in step for step in steps)
        assert sum(step["zero_variance/grown_groups"] for step in steps) > 0
        rl = json.loads((out / phase / "config.json").read_text())["rl"]
        assert rl["replay"] == "R3" and rl["objective"]["alpha"] == 0.5
        assert rl["zero_variance"]["rl_zvp"] and rl["zero_variance"]["curriculum"]
    rulings = (out / "08-domain" / "config.json").read_text()
    assert str(out / "07-judge" / "rl") in rulings
