"""metrics.jsonl as series, and as the thinned lists of a page's curves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.base.errors import UserError
from compass_jax.runs.logfile import log_parts

Row = TypeVar("Row")
# the errors of a line that no run wrote
_DAMAGES = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
Series = dict[str, tuple[np.ndarray, np.ndarray]]


class ReportError(UserError):
    """There is no run to report on, or a line of a log is damaged; the message names the file."""


def parse_line(line: str | bytes, parse: Callable[[Json], Row], path: Json, number: int) -> Row:
    """Returns `parse` of a line's JSON. Raises ReportError, with its number, if that fails."""
    try:
        text = line if isinstance(line, str) else line.decode(errors="replace")
        return parse(json.loads(text))
    except _DAMAGES as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ReportError(f"{path}, line {number}: it is damaged ({reason})") from error


def parse_lines(path: str | os.PathLike, parse: Callable[[Json], Row]) -> Iterator[Row]:
    """Yields `parse` of each line of a log, of all its parts. Skips an incomplete last line (cut by
    a kill, or being written). Raises ReportError for any other damaged line.
    """
    try:
        for part in log_parts(Path(path)) or [Path(path)]:
            with open(part, encoding="utf-8", errors="replace") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith("\n"):
                        yield parse_line(line, parse, part, number)
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from error


def read_object(file: Path) -> JsonObject:
    """Returns the JSON object in a file, or an empty dict if the file is absent or damaged."""
    try:
        content = json.loads(file.read_text("utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_metrics(path: str | os.PathLike, stage: str | None = None) -> Series:
    """Returns metric name -> (steps, values) of a metrics.jsonl, with null as NaN; of one stage, or
    of all. Raises ReportError like `parse_lines`.
    """
    records = parse_lines(path, _record)
    return _series(record for line_stage, record in records if stage is None or line_stage == stage)


def read_stages(path: str | os.PathLike) -> dict[str, Series]:
    """Returns stage -> its series, in the order of their first steps. Raises ReportError like
    `read_metrics`.
    """
    stages: dict[str, list] = {}
    for stage, record in parse_lines(path, _record):
        stages.setdefault(stage, []).append(record)
    return {stage: _series(records) for stage, records in stages.items()}


def _record(row: Json) -> tuple[str, tuple[int, dict[str, float | None]]]:
    """Returns (stage, (step, metrics)) of a line."""
    metrics = {name: None if x is None else float(x) for name, x in row["metrics"].items()}
    return str(row.get("stage", "")), (int(row["step"]), metrics)


def _series(records: Iterator | list) -> Series:
    series: dict[str, tuple[list, list]] = {}
    for step, metrics in records:
        for name, value in metrics.items():
            steps, values = series.setdefault(name, ([], []))
            steps.append(step)
            values.append(np.nan if value is None else value)
    return {
        name: (np.asarray(steps), np.asarray(values, float))
        for name, (steps, values) in series.items()
    }


def thinned(series: Series, points: int) -> JsonObject:
    """Returns the series of one stage as JSON.

    `steps`: the last step of each point. `every`: steps per point. `metrics`: name -> {"v": the
    mean of each point, null for a point without values, "bad": the number of logged values that
    were not finite}.
    """
    steps = np.unique(np.concatenate([x for x, _ in series.values()]))
    every = max(1, -(-len(steps) // points))
    metrics = {}
    for name, (logged_steps, values) in series.items():
        metrics[name] = {
            "v": _bin_means(
                np.searchsorted(steps, logged_steps) // every, values, -(-len(steps) // every)
            ),
            "bad": int(np.sum(~np.isfinite(values))),
        }
    ends = [int(x) for x in steps[every - 1 :: every]]
    if len(steps) % every:
        ends.append(int(steps[-1]))
    return {"steps": ends, "every": every, "metrics": metrics}


Bins = list[tuple[float, float, float]]  # (low, high, count)


def read_histograms(path: str | os.PathLike, stage: str) -> dict[str, dict[int, Bins]]:
    """Returns name -> step -> bins of a stage of a metrics.jsonl. Lines of earlier versions have
    none.
    """
    histograms: dict[str, dict[int, Bins]] = {}
    for row in parse_lines(path, lambda row: row):
        if row.get("stage", "") == stage:
            for name, bins in row.get("histograms", {}).items():
                histograms.setdefault(name, {})[int(row["step"])] = bins
    return histograms


def heat_map(by_step: Mapping[int, Bins], columns: int = 60, rows: int = 16) -> JsonObject:
    """Returns distributions over the steps as JSON: `low` and `high` of the whole range, `steps`
    (the last one of each column) and `cells`, the share of a column's values in each of the rows
    from `low` up. A bin's count is spread evenly over the rows that it covers.
    """
    steps = sorted(by_step)
    every = max(1, -(-len(steps) // columns))
    bins = [b for step in steps for b in by_step[step]]
    low, high = (min(b[0] for b in bins), max(b[1] for b in bins)) if bins else (0.0, 0.0)
    width = (high - low) / rows or 1.0
    cells, ends = [], []
    for first in range(0, len(steps), every):
        counts = np.zeros(rows)
        for step in steps[first : first + every]:
            for start, end, count in by_step[step]:
                lowest = min(int((start - low) / width), rows - 1)
                highest = min(max(int(np.ceil((end - low) / width)) - 1, lowest), rows - 1)
                counts[lowest : highest + 1] += count / (highest + 1 - lowest)
        total_count = counts.sum()
        cells.append([number(round(x / total_count, 4)) if total_count else 0 for x in counts])
        ends.append(steps[min(first + every, len(steps)) - 1])
    return {"low": number(low), "high": number(high), "steps": ends, "cells": cells}


def hours(series: Series, ends: list[int]) -> list[float]:
    """Returns the hours of work up to the end of each of the steps `ends`; empty if the run did not
    log its times. Without time/step_s, in earlier versions, the times of the parts are added.
    """
    names = ("rollout", "reward_wait", "score", "update", "handover", "rollout_wait")
    parts = ["time/step_s"] if "time/step_s" in series else [f"time/{x}_s" for x in names]
    steps, seconds = [], []
    for name in parts:
        logged, values = series.get(name, (np.array([]), np.array([])))
        steps.append(logged)
        seconds.append(np.nan_to_num(values))
    at, spent = np.concatenate(steps), np.concatenate(seconds)
    if not at.size:
        return []
    return [float(f"{spent[at <= end].sum() / 3600:.5g}") for end in ends]


def _bin_means(at: np.ndarray, values: np.ndarray, bins: int) -> list[float | None]:
    finite = np.isfinite(values)
    counts = np.bincount(at[finite], minlength=bins)
    sums = np.bincount(at[finite], values[finite], minlength=bins)
    means = np.divide(sums, counts, out=np.full(bins, np.nan), where=counts > 0)
    return [number(x) for x in means]


def number(x: Json) -> int | float | None:
    """Returns a number with five significant digits for JSON, or None for None and numbers that are
    not finite.
    """
    if isinstance(x, bool) or not isinstance(x, int | float | np.number) or not np.isfinite(x):
        return None
    rounded = float(f"{float(x):.5g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def total(series: Mapping[str, tuple[np.ndarray, np.ndarray]], name: str) -> float:
    """Returns the sum of a metric over all steps, or 0 for a metric that was not logged."""
    return float(np.nansum(series[name][1])) if name in series else 0.0
