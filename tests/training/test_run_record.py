"""A real tiny run: its files for the report page, and an end before rl.steps."""

import dataclasses
import json

import pytest
from evolve import evolve
from logged import lines
from tiny_run import tiny_run

from compass_jax.runs import machine
from compass_jax.runs.metric_table import metric_help
from compass_jax.training.rl import run_rl


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    base = tiny_run("odd_verifiers:coin")
    (source,) = base.data.sources
    more = dataclasses.replace(source, label="other", size=40)
    folder = tmp_path_factory.mktemp("recorded") / "rl"
    stages = dataclasses.replace(base.rl.zero_variance, grow_to=8)
    return evolve(
        base,
        run_dir=str(folder),
        data={"sources": (source, more)},
        evaluation={"start": True},
        rl={"steps": 3, "zero_variance": stages},
    ), folder


def test_a_run_ends_early_where_it_has_enough_and_is_not_trained_on_when_started_again(run, capsys):
    config, folder = run

    def enough():
        return (folder / "metrics.jsonl").exists() and len(lines(folder)) > 0

    first = run_rl(config, enough=enough)
    assert (first["steps"], first["stopped"]) == (1, False)
    assert first["evaluation"].prompts == 4
    output = capsys.readouterr().out
    assert output.count("before the first step, held-out: avg@") == 1
    resumed = run_rl(config, enough=enough)
    assert (resumed["steps"], resumed["stopped"]) == (1, False)
    assert resumed["evaluation"].avg_at_k == first["evaluation"].avg_at_k
    assert "before the first step" not in capsys.readouterr().out

    (row,) = lines(folder)
    metrics = row["metrics"]
    assert [name for name in metrics if metric_help(name) is None] == []
    for label in ("sum", "other"):
        assert f"label/{label}/length_mean_tokens" in metrics
    assert metrics["time/step_s"] > 0
    assert metrics["mismatch/kl_k3"] < 1e-6 and metrics["mismatch/ess"] > 1 - 1e-6
    samples = sum(count for _, _, count in row["histograms"]["response_length"])
    assert samples >= config.rl.prompts_per_step * config.rl.group_size

    for name in ("evaluation_start", "evaluation"):
        summary = json.loads((folder / name / "summary.json").read_text())
        low, high = summary["sets"]["heldout"]["interval"]
        assert low <= summary["avg_at_k"] <= high
        assert len((folder / name / "answers.jsonl").read_text().splitlines()) == 4
    last = json.loads((folder / "evaluation.json").read_text())["metrics"]
    assert last["eval/heldout/avg_at_k_low"] <= last["eval/heldout/avg_at_k"]


def test_another_machine_is_said_and_the_run_goes_on(tmp_path, monkeypatch):
    assert machine.record_machine(tmp_path) == []
    assert machine.record_machine(tmp_path) == []
    facts = machine.read_machine(tmp_path)
    assert facts["cores"] >= 1 and facts["devices"] >= 1 and facts["jax"]
    monkeypatch.setattr(machine, "machine_facts", lambda: facts | {"cores": 1024})
    (notice,) = machine.record_machine(tmp_path)
    assert f"cores {facts['cores']} -> 1024" in notice and "only up to rounding" in notice
    for damaged in ("", "[]", "{", "3"):
        (tmp_path / machine.MACHINE).write_text(damaged)
        assert machine.record_machine(tmp_path) == []
