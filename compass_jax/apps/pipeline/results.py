"""The table of every stage's accuracy on every set, and the page of all runs."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from compass_jax.apps.pipeline.record import DONE, RUNNING, Record
from compass_jax.base.aliases import JsonObject
from compass_jax.base.untrusted import read_json
from compass_jax.config import ConfigError
from compass_jax.config.stages import Evaluate, Rl, Sft, Stage
from compass_jax.runs.report import run_report, summary_table
from compass_jax.runs.rundir import SUMMARY, write_atomically
from compass_jax.weights import checkpoint

JSON, MARKDOWN, PAGE = "results.json", "results.md", "report.html"


def results(record: Record) -> JsonObject:
    """Returns stage -> set -> the numbers of its weights, from the finished evaluations."""
    measured: dict[str, JsonObject] = {}
    for stage in record.config.stages:
        if isinstance(stage, Evaluate):
            for name in stage.of:
                file = record.place(stage) / name / SUMMARY
                if file.is_file():
                    measured.setdefault(name, {}).update(sets_of(file))
    order = [stage.name for stage in record.config.stages]
    return {name: measured[name] for name in order if name in measured}


def sets_of(file: Path) -> JsonObject:
    """Returns set -> numbers of a summary.json. Raises ConfigError for another file."""
    plain = read_json(file, error=ConfigError)
    try:
        return {str(name): dict(numbers) for name, numbers in plain["sets"].items()}
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ConfigError(f"{file} is no summary of an evaluation ({error})") from error


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


def report(record: Record, console: Console) -> None:
    """Writes results.json, results.md and the page of all runs, and prints the table."""
    accuracies = results(record)
    if accuracies:
        write_atomically(record.folder / JSON, json.dumps({"stages": accuracies}, indent=1) + "\n")
        about = "Accuracy of each stage's weights on each set: avg@k in percent, with its standard"
        text = f"{about} error.\n\n{markdown(accuracies)}"
        write_atomically(record.folder / MARKDOWN, text)
    runs = [record.place(x) for x in record.config.stages if isinstance(x, Sft | Rl)]
    if runs:
        run_report(runs, str(record.folder / PAGE), console)
    if accuracies:
        console.print(results_table(record))
        console.print(f"the same: {record.folder / JSON}, {record.folder / MARKDOWN}")


def results_table(record: Record) -> Table:
    """Returns the table of every stage on every set."""
    return summary_table(rows(results(record)), title="avg@k in percent, with its standard error")


def status_table(record: Record) -> Table:
    """Returns the table of each stage's state and the seconds of its last start."""
    table = []
    for number, stage in enumerate(record.config.stages, 1):
        entry = record.entry(stage.name)
        state = record.state(stage.name)
        table.append(
            {
                "stage": f"{number} {stage.name}",
                "kind": type(stage).__name__.lower(),
                "state": state + (_step(record, stage) if state == RUNNING else ""),
                "seconds": f"{entry.seconds:.0f}" if entry and state == DONE else "",
                "folder": str(record.place(stage)),
            }
        )
    return summary_table(table, title=str(record.folder))


def _step(record: Record, stage: Stage) -> str:
    """Returns ", step 20 of 40" for a run that has a checkpoint; else an empty text."""
    if not isinstance(stage, Sft | Rl):
        return ""
    steps = stage.run.sft.steps if isinstance(stage, Sft) else stage.run.rl.steps
    return f", step {checkpoint.latest(record.place(stage)) or 0} of {steps}"
