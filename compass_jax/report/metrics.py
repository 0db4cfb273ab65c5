"""metrics.jsonl as series, and as the thinned lists that a page draws."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compass_jax.errors import UserError

Series = dict[str, tuple[np.ndarray, np.ndarray]]


class ReportError(UserError):
    """There is nothing to report on, or a line of a log is damaged; the message names the file."""


def whole_lines(path: str | os.PathLike) -> Iterator[tuple[int, str]]:
    """(number, line) of a log, from 1; a last line that a kill cut off, or that is being written,
    is passed over.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if line.endswith("\n"):
                    yield number, line
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from error


def read_metrics(path: str | os.PathLike, stage: str | None = None) -> Series:
    """Metric name -> (steps, values) of a metrics.jsonl, null as NaN; of one stage, or of all of
    them.

    A last line cut off by a kill is passed over; any other damaged line raises ReportError naming
    it.
    """
    return _series(
        metrics for own, metrics in _records(Path(path)) if stage is None or own == stage
    )


def read_stages(path: str | os.PathLike) -> dict[str, Series]:
    """Stage -> its series, in the order in which they began; like `read_metrics`."""
    stages: dict[str, list] = {}
    for stage, record in _records(Path(path)):
        stages.setdefault(stage, []).append(record)
    return {stage: _series(records) for stage, records in stages.items()}


def _records(path: Path) -> Iterator[tuple[str, tuple[int, dict[str, float | None]]]]:
    """(stage, (step, metrics)) of each line."""
    for number, line in whole_lines(path):
        try:
            record = json.loads(line)
            step, metrics = int(record["step"]), record["metrics"]
            values = {name: None if x is None else float(x) for name, x in metrics.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ReportError(f"{path}, line {number}: not a line of metrics ({error})") from error
        yield str(record.get("stage", "")), (step, values)


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


def thinned(series: Series, points: int) -> dict[str, Any]:
    """Series of one stage as JSON: `steps` (the last one of each point), `every` (steps of a
    point), and `metrics`, name -> {"v": the mean of each point, null where there is none, "bad":
    logged values that were not finite}.
    """
    steps = np.unique(np.concatenate([x for x, _ in series.values()]))
    every = max(1, -(-len(steps) // points))
    metrics = {}
    for name, (own, values) in series.items():
        metrics[name] = {
            "v": _bin_means(np.searchsorted(steps, own) // every, values, -(-len(steps) // every)),
            "bad": int(np.sum(~np.isfinite(values))),
        }
    ends = [int(x) for x in steps[every - 1 :: every]]
    if len(steps) % every:
        ends.append(int(steps[-1]))
    return {"steps": ends, "every": every, "metrics": metrics}


def _bin_means(at: np.ndarray, values: np.ndarray, bins: int) -> list[float | None]:
    finite = np.isfinite(values)
    counts = np.bincount(at[finite], minlength=bins)
    sums = np.bincount(at[finite], values[finite], minlength=bins)
    means = np.divide(sums, counts, out=np.full(bins, np.nan), where=counts > 0)
    return [number(x) for x in means]


def number(x: Any) -> int | float | None:
    """A number with five significant digits, as JSON holds it; None for what is none or not
    finite.
    """
    if isinstance(x, bool) or not isinstance(x, int | float | np.number) or not np.isfinite(x):
        return None
    rounded = float(f"{float(x):.5g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def total(series: Mapping[str, tuple[np.ndarray, np.ndarray]], name: str) -> float:
    """The sum of a metric over all steps, 0 where it was not logged."""
    return float(np.nansum(series[name][1])) if name in series else 0.0
