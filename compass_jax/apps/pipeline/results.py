"""The table of every stage's accuracy on every set, and the page of all runs."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from compass_jax.apps.pipeline.stages import DONE, RUNNING, Pipeline, Stage
from compass_jax.apps.pipeline.work import evaluate, rl, sft
from compass_jax.base.aliases import JsonObject
from compass_jax.base.untrusted import read_json
from compass_jax.config import ConfigError
from compass_jax.runs.report import run_report, summary_table
from compass_jax.runs.rundir import SUMMARY, write_atomically
from compass_jax.weights import checkpoint

JSON, MARKDOWN, PAGE = "results.json", "results.md", "report.html"


def results(pipeline: Pipeline) -> JsonObject:
    """Returns name -> set -> the numbers of its weights, from the finished evaluations."""
    measured: dict[str, JsonObject] = {stage.name: {} for stage in pipeline.stages}
    for stage in pipeline.stages:
        for name in stage.settings["of"] if stage.function is evaluate else ():
            file = stage.folder / name / SUMMARY
            if file.is_file():
                sets = read_json(file, error=ConfigError)["sets"]
                measured.setdefault(name, {}).update(sets)
    return {name: sets for name, sets in measured.items() if sets}


def rows(accuracies: dict[str, JsonObject]) -> list[dict[str, str]]:
    """Returns a row for each stage: avg@k of each set with its standard error, in percent."""
    names = list(dict.fromkeys(name for sets in accuracies.values() for name in sets))
    return [
        {"stage": stage} | {x: _cell(sets.get(x)) for x in names}
        for stage, sets in accuracies.items()
    ]


def _cell(numbers: JsonObject | None) -> str:
    if numbers is None:
        return ""
    mean, error = numbers["avg_at_k"], numbers["avg_at_k_se"]
    if mean is None:
        return "unknown"
    return f"{100 * mean:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def markdown(accuracies: dict[str, JsonObject]) -> str:
    """Returns the rows as a Markdown table."""
    table = rows(accuracies)
    names = list(table[0]) if table else []
    lines = [names, ["---"] * len(names), *(list(row.values()) for row in table)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def report(pipeline: Pipeline, console: Console) -> None:
    """Writes results.json, results.md and the page of all runs, and prints the table."""
    folder = pipeline.folder
    if accuracies := results(pipeline):
        write_atomically(folder / JSON, json.dumps({"stages": accuracies}, indent=1) + "\n")
        about = "Accuracy of each stage's weights on each set: avg@k in percent, with its standard"
        write_atomically(folder / MARKDOWN, f"{about} error.\n\n{markdown(accuracies)}")
    if runs := [stage.folder for stage in pipeline.stages if stage.function in (sft, rl)]:
        run_report(runs, str(folder / PAGE), console)
    if accuracies:
        console.print(results_table(accuracies))
        console.print(f"the same: {folder / JSON}, {folder / MARKDOWN}")


def results_table(accuracies: dict[str, JsonObject]) -> Table:
    """Returns the table of every stage on every set."""
    return summary_table(rows(accuracies), title="avg@k in percent, with its standard error")


def status_table(pipeline: Pipeline) -> Table:
    """Returns the table of each stage's state and the seconds of its last start."""
    table = []
    for number, stage in enumerate(pipeline.stages, 1):
        entry, state = pipeline.entries.get(stage.name), pipeline.state(stage)
        table.append(
            {
                "stage": f"{number} {stage.name}",
                "kind": stage.kind,
                "state": state + (_step(stage) if state == RUNNING else ""),
                "seconds": f"{entry.seconds:.0f}" if entry and state == DONE else "",
                "folder": str(stage.folder),
            }
        )
    return summary_table(table, title=str(pipeline.folder))


def _step(stage: Stage) -> str:
    """Returns ", step 20 of 40" for a run; else an empty text."""
    if stage.function not in (sft, rl):
        return ""
    run = stage.settings["run"]
    steps = (run.sft if stage.function is sft else run.rl).steps
    return f", step {checkpoint.latest(stage.folder) or 0} of {steps}"
