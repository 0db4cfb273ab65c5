"""`compass report`: the table of each run, and one page of all runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from compass_jax.runs.logfile import replaced
from compass_jax.runs.report.embed import page
from compass_jax.runs.report.metrics import ReportError, Series, read_stages
from compass_jax.runs.report.page_data import page_data
from compass_jax.runs.report.table import run_rows, summary_table, without_verdict
from compass_jax.runs.rundir import is_locked

WATCH_S = 20.0  # interval of `watch_report`


class NotStarted(ReportError):
    """The run has not logged a step; the message names the file."""


def run_report(
    runs: Sequence[str | os.PathLike], out: str = "", console: Console | None = None
) -> Path:
    """Prints the table of each stage of each run, writes one page of all runs to `out`, and returns
    its path.

    An empty `out` means report.html in the run's folder, or report_compared.html in the first of
    several. Raises ReportError if a folder has no run, or a log is damaged.
    """
    console = console or Console(emoji=False)
    folders = list(dict.fromkeys(Path(run) for run in runs))
    runs_by_folder = {folder: _stages(folder) for folder in folders}
    for folder, stages in runs_by_folder.items():
        _print_tables(folder, stages, console)
    path = write_page(runs_by_folder, out)
    console.print(f"page: {path}", highlight=False, soft_wrap=True)
    return path


def watch_report(
    runs: Sequence[str | os.PathLike],
    out: str = "",
    every_s: float = WATCH_S,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Rewrites the page of the runs every `every_s` seconds while a process writes to one of them,
    then returns the result of `run_report`.

    The page reloads itself meanwhile. Waits for a run that has not logged its first step yet.
    """
    console = console or Console(emoji=False)
    folders = list(dict.fromkeys(Path(run) for run in runs))
    last_line = ""
    while any(map(is_locked, folders)):
        try:
            stages = {folder: _stages(folder) for folder in folders}
            path = write_page(stages, out, again_s=every_s)
            steps = ", ".join(f"{folder}: step {_last_step(stages[folder])}" for folder in folders)
            line = f"page: {path} ({steps}); it is written again every {every_s:g} s; Ctrl-C ends"
        except NotStarted as waiting:
            line = str(waiting)
        if line != last_line:
            console.print(line, highlight=False, soft_wrap=True)
            last_line = line
        sleep(every_s)
    console.print("no process writes to the runs: this is the last page", highlight=False)
    return run_report(runs, out, console)


def _last_step(stages: dict[str, Series]) -> int:
    """Returns the last step of the most recently logged stage."""
    return max(int(steps[-1]) for steps, _ in list(stages.values())[-1].values())


def write_page(runs: Mapping[Path, dict[str, Series]], out: str = "", again_s: float = 0) -> Path:
    """Writes only the page of runs, each a folder and its stages, like `run_report`.

    again_s: see `page_data`.
    """
    name = "report.html" if len(runs) == 1 else "report_compared.html"
    path = Path(out) if out else next(iter(runs)) / name
    title = ", ".join(str(folder) for folder in runs)
    _write(path, page(f"compass: {title}", page_data(list(runs.items()), again_s=again_s)))
    return path


def _stages(folder: Path) -> dict[str, Series]:
    """Returns stage -> its series. Raises NotStarted without a logged step."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        inside = sorted(x.parent.name for x in folder.glob("*/metrics.jsonl"))
        advice = f"; it holds {', '.join(inside)}: name {folder / inside[0]}" if inside else ""
        raise NotStarted(
            f"{metrics} does not exist: {folder} is not the directory of a run that has"
            f" started{advice}"
        )
    stages = {stage: series for stage, series in read_stages(metrics).items() if series}
    if not stages:
        raise NotStarted(f"{metrics}: no step has been logged yet; wait for the first one")
    return stages


def _print_tables(folder: Path, stages: dict[str, Series], console: Console) -> None:
    for stage, series in stages.items():
        if rows := run_rows(series):
            console.print(summary_table(rows, title=f"{folder}: {stage}"))
        if lost := without_verdict(series):
            console.print(lost, highlight=False, soft_wrap=True)


def _write(path: Path, content: bytes) -> None:
    """Replaces the file atomically, so that a browser never loads half of it."""
    try:
        with replaced(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise ReportError(
            f"{path} cannot be written: {error.strerror or error}; name another file with --out"
        ) from error
