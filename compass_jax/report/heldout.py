"""The evaluations of a run for its page: accuracies over the steps with their intervals, and the
answers before the first step and after the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compass_jax.config.data import HELDOUT
from compass_jax.report.embed import size_of
from compass_jax.report.metrics import Series, number, parse_lines, read_object
from compass_jax.report.samples import evenly, group_of_row
from compass_jax.runs.rundir import (
    ANSWERS,
    EVALUATION,
    EVALUATION_FOLDER,
    EVALUATION_START,
    SUMMARY,
)

KEYS = ("avg_at_k", "avg_at_k_low", "avg_at_k_high", "pass_at_k", "greedy", "reward")


def evaluations(folder: Path, series: Series) -> dict[str, Any]:
    """Returns the accuracies of each evaluated set, as JSON.

    The result is set -> {"k", "prompts" (null if not recorded), "points": a dict with the step and
    KEYS for each evaluation, "by": label -> [prompts, accuracy at the start, at the end, interval
    at the end]}. The start is step 0.
    """
    start = read_object(folder / EVALUATION_START / SUMMARY)
    end = read_object(folder / EVALUATION_FOLDER / SUMMARY)
    last_step, last = _last(folder / EVALUATION)
    names = [name.split("/")[1] for name in [*series, *last] if _is_accuracy(name)]
    sets = {}
    for name in dict.fromkeys([*_sets(start), *_sets(end), *names]):
        points = _points(name, series)
        if (first := _sets(start).get(name)) and (point := _point_of(first)):
            points = {0: point, **points}
        if last_step is not None and f"eval/{name}/avg_at_k" in last:
            points[last_step] = {key: number(last.get(f"eval/{name}/{key}")) for key in KEYS}
        if points:
            final = _sets(end).get(name) or first or {}
            sets[name] = {
                "k": number(final.get("k")),
                "prompts": number(final.get("prompts")),
                "points": [{"step": step, **points[step]} for step in sorted(points)],
                "by": _by_label(first or {}, _sets(end).get(name) or {}),
            }
    return dict(sorted(sets.items(), key=lambda item: item[0] != HELDOUT))


def _is_accuracy(name: str) -> bool:
    """Returns whether a metric is the accuracy of a set; labels have no greedy accuracy."""
    parts = name.split("/")
    return len(parts) == 3 and parts[0] == "eval" and parts[2] == "greedy"


def _points(name: str, series: Series) -> dict[int, dict[str, Any]]:
    """Returns step -> numbers, from the evaluations within the run."""
    points: dict[int, dict[str, Any]] = {}
    for key in KEYS:
        steps, values = series.get(f"eval/{name}/{key}", ((), ()))
        for step, value in zip(steps, values, strict=True):
            points.setdefault(int(step), dict.fromkeys(KEYS))[key] = number(value)
    return points


def _point_of(one: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the numbers of a set in a summary.json, or None for another form."""
    try:
        low, high = one["interval"]
        passed = one["pass_at"][str(one["k"])]
    except (KeyError, TypeError, ValueError):
        return None
    numbers = {**one, "avg_at_k_low": low, "avg_at_k_high": high, "pass_at_k": passed}
    return {key: number(numbers.get(key)) for key in KEYS}


def _by_label(start: dict[str, Any], end: dict[str, Any]) -> dict[str, list[Any]]:
    labels: dict[str, list[Any]] = {}
    try:
        for label, one in end.get("by", {}).items():
            first = start.get("by", {}).get(label, {}).get("avg_at_k")
            interval = [number(x) for x in one["interval"]]
            row = [number(one["prompts"]), number(first), number(one["avg_at_k"]), interval]
            labels[str(label)] = row
    except (AttributeError, KeyError, TypeError):
        return {}
    return labels


def _sets(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    sets = summary.get("sets")
    pairs = sets.items() if isinstance(sets, dict) else ()
    return {str(name): one for name, one in pairs if isinstance(one, dict)}


def _last(file: Path) -> tuple[int | None, dict[str, Any]]:
    """Returns (step, metrics) of the evaluation after a run's last step."""
    record = read_object(file)
    step, metrics = record.get("step"), record.get("metrics")
    if not isinstance(step, int) or not isinstance(metrics, dict):
        return None, {}
    return step, metrics


def evaluation_answers(folder: Path, room: int) -> tuple[list[dict[str, Any]], int]:
    """Returns the evaluated prompts whose answers fit into `room` bytes of JSON, evenly over the
    sets, and the number of all prompts.

    Each has the samples of the start and of the end, the greedy answer last; null for a missing
    evaluation.
    """
    start = dict(_rows(folder / EVALUATION_START / ANSWERS))
    end = dict(_rows(folder / EVALUATION_FOLDER / ANSWERS))
    keys = list(dict.fromkeys([*end, *start]))
    chosen: dict[int, dict[str, Any]] = {}
    for i in evenly(len(keys)):
        row = dict(end.get(keys[i]) or start[keys[i]])
        del row["samples"], row["visit"]
        row["set"] = keys[i][0]
        for name, rows in (("start", start), ("end", end)):
            row[name] = rows[keys[i]]["samples"] if keys[i] in rows else None
        if (size := size_of(row)) > room:
            break
        chosen[i], room = row, room - size
    return [chosen[i] for i in sorted(chosen)], len(keys)


def _rows(file: Path) -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """Yields ((set, id, prompt), group) of the lines of an answers.jsonl."""

    def parse(row: Any) -> tuple[tuple[str, str, str], dict[str, Any]]:
        return (str(row["set"]), str(row["id"]), json.dumps(row["prompt"])), group_of_row(row)

    return parse_lines(file, parse) if file.is_file() else iter(())
