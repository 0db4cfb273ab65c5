"""The evaluations of a run for its page: accuracies over the steps with their intervals, and the
answers before the first step and after the last one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.config.data import HELDOUT
from compass_jax.runs.report.embed import size_of
from compass_jax.runs.report.metrics import Series, number, parse_lines, read_object
from compass_jax.runs.report.samples import evenly, group_of_row
from compass_jax.runs.rundir import (
    ANSWERS,
    EVALUATION,
    EVALUATION_FOLDER,
    EVALUATION_START,
    SUMMARY,
)

KEYS = ("avg_at_k", "avg_at_k_low", "avg_at_k_high", "pass_at_k", "greedy", "reward")


def evaluations(folder: Path, series: Series) -> JsonObject:
    """Returns the accuracies of each evaluated set, as JSON.

    The result is set -> {"k", "prompts" (null if not recorded), "points": a dict with the step and
    KEYS for each evaluation, "by": label -> [prompts, accuracy at the start, at the end, interval
    at the end]}. The start is step 0.
    """
    start, end = (
        read_object(folder / name / SUMMARY).get("sets", {})
        for name in (EVALUATION_START, EVALUATION_FOLDER)
    )
    record = read_object(folder / EVALUATION)  # of the evaluation after the last step
    last = record.get("metrics", {})
    # labels, unlike sets, have no greedy accuracy
    names = [x.split("/")[1] for x in [*series, *last] if re.fullmatch("eval/[^/]+/greedy", x)]
    sets = {}
    for name in dict.fromkeys([*start, *end, *names]):
        points, first = _points(name, series), start.get(name, {})
        if "pass_at" in first:
            points = {0: _point_of(first), **points}
        if f"eval/{name}/avg_at_k" in last:
            numbers = {key: number(last.get(f"eval/{name}/{key}")) for key in KEYS}
            points[int(record["step"])] = numbers
        if points:
            final = end.get(name) or first
            sets[name] = {
                "k": number(final.get("k")),
                "prompts": number(final.get("prompts")),
                "points": [{"step": step, **points[step]} for step in sorted(points)],
                "by": _by_label(first, end.get(name, {})),
            }
    return dict(sorted(sets.items(), key=lambda item: item[0] != HELDOUT))


def _points(name: str, series: Series) -> dict[int, JsonObject]:
    """Returns step -> numbers, from the evaluations within the run."""
    points: dict[int, JsonObject] = {}
    for key in KEYS:
        steps, values = series.get(f"eval/{name}/{key}", ((), ()))
        for step, value in zip(steps, values, strict=True):
            points.setdefault(int(step), dict.fromkeys(KEYS))[key] = number(value)
    return points


def _point_of(one: JsonObject) -> JsonObject:
    """Returns the numbers of a set in a summary.json."""
    low, high = one["interval"]
    numbers = {**one, "avg_at_k_low": low, "avg_at_k_high": high}
    numbers["pass_at_k"] = one["pass_at"][str(one["k"])]
    return {key: number(numbers.get(key)) for key in KEYS}


def _by_label(start: JsonObject, end: JsonObject) -> dict[str, list[Json]]:
    labels = {}
    for label, one in end.get("by", {}).items():
        first = start.get("by", {}).get(label, {}).get("avg_at_k")
        interval = [number(x) for x in one["interval"]]
        accuracies = number(first), number(one["avg_at_k"])
        labels[label] = [number(one["prompts"]), *accuracies, interval]
    return labels


def evaluation_answers(folder: Path, room: int) -> tuple[list[JsonObject], int]:
    """Returns the evaluated prompts whose answers fit into `room` bytes of JSON, evenly over the
    sets, and the number of all prompts.

    Each has the samples of the start and of the end, the greedy answer last; null for a missing
    evaluation.
    """
    start = dict(_rows(folder / EVALUATION_START / ANSWERS))
    end = dict(_rows(folder / EVALUATION_FOLDER / ANSWERS))
    keys = list(dict.fromkeys([*end, *start]))
    chosen: dict[int, JsonObject] = {}
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


def _rows(file: Path) -> Iterator[tuple[tuple[str, str, str], JsonObject]]:
    """Yields ((set, id, prompt), group) of the lines of an answers.jsonl."""

    def parse(row: Json) -> tuple[tuple[str, str, str], JsonObject]:
        return (str(row["set"]), str(row["id"]), json.dumps(row["prompt"])), group_of_row(row)

    return parse_lines(file, parse) if file.is_file() else iter(())
