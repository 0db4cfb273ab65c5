"""The writer of a run's numbers: metrics.jsonl, rollouts.jsonl, tokens.jsonl, the trackers and the
screen.

A line of metrics.jsonl is {"stage": ..., "step": ..., "metrics": {name: number}}; a number that is
not finite is null. RL adds "histograms": {name: [[low, high, count], ...]}. Steps count from 1.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from compass_jax.base.aliases import JsonMapping, JsonObject
from compass_jax.runs.logfile import BUCKET_STEPS, LogError, LogFile, is_on_bucket
from compass_jax.runs.screen import Screen
from compass_jax.runs.trackers.board import Board
from compass_jax.runs.trackers.opened import open_trackers
from compass_jax.runs.watchdog import Watchdog


def plain_numbers(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Returns the metrics for JSON, with None for a number that is not finite."""
    return {name: float(x) if math.isfinite(x) else None for name, x in metrics.items()}


class Telemetry:
    """Writes the metrics of one stage ("sft", "rl", ...) of a run.

    `log` flushes its lines to the operating system before it returns, so `kill -9` loses none.
    `state()` is part of the checkpoint, and `restore()` removes the lines logged after it, so that
    no step is logged twice. The lines that a checkpoint counts are on the disk before it; if some
    are missing later, `restore` raises an error unless `lost_log` is set.

    `check` is called before each write and raises if the run directory was replaced. Of several
    processes one writes; the others (`writes` is False) record and show nothing. `trackers` get the
    same numbers, with `settings` (the run's configuration in JSON's types). A process that shows no
    phase for `stall_s` seconds ends (0: never). `part_steps` are those of each part of a file (0:
    BUCKET_STEPS on a bucket, else all).
    """

    def __init__(
        self,
        run_dir: str | os.PathLike,
        total_steps: int,
        stage: str,
        *,
        every_s: float = 10.0,
        console: Console | None = None,
        writes: bool = True,
        check: Callable[[], None] = lambda: None,
        lost_log: bool = False,
        trackers: Sequence[str] = ("tensorboard",),
        settings: JsonMapping | None = None,
        stall_s: float = 0.0,
        part_steps: int = 0,
    ):
        self._watchdog = Watchdog(stall_s)
        self.run_dir = Path(run_dir)
        self.writes = writes
        if writes:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        self.total_steps = total_steps
        self.stage = stage
        self.every_s = every_s
        self.console = console or Console(file=sys.stdout, soft_wrap=True, emoji=False)
        self.check = check
        self.lost_log = lost_log
        names = ("metrics", "rollouts", "tokens") if writes else ()
        part_steps = part_steps or BUCKET_STEPS * is_on_bucket(self.run_dir)
        self._files = {
            name: LogFile(self.run_dir / f"{name}.jsonl", stage, part_steps) for name in names
        }
        self._last_step = 0
        self.screen = Screen(self.console, stage, total_steps, every_s)
        self.screen.begin(0)
        used = trackers if writes else ()
        self._trackers = open_trackers(used, self.run_dir, stage, settings or {}, self.note)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(LogError):  # the error that ends the run reports it
            self.close()

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        histograms: Mapping[str, Sequence[tuple[float, float, int]]] | None = None,
    ) -> None:
        """Records the metrics of `step` and shows progress. Values are numbers, or arrays of one
        element.

        `histograms` (name -> bins of low, high, count) are written only to the file.
        """
        if not self.writes:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        row: JsonObject = {"metrics": plain_numbers(numbers)}
        self._append("metrics", step, [row | ({"histograms": histograms} if histograms else {})])
        for tracker in self._trackers:
            tracker.log(step, numbers)
        self._last_step = step
        self.screen.step(step, numbers)

    def log_rollouts(self, step: int, rows: Iterable[JsonMapping]) -> None:
        """Records samples (JSON-able rows) of `step` in rollouts.jsonl."""
        self._append("rollouts", step, rows)

    def log_tokens(self, step: int, rows: Iterable[JsonMapping]) -> None:
        """Records per-token numbers (JSON-able rows) of `step` in tokens.jsonl."""
        self._append("tokens", step, rows)

    def _append(self, name: str, step: int, rows: Iterable[JsonMapping]) -> None:
        if self.writes:
            self.check()
            self._files[name].append([{"stage": self.stage, "step": step, **row} for row in rows])

    def note(self, text: str) -> None:
        """Prints a line above the progress."""
        if self.writes:
            self.screen.note(text)

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Shows the current phase and its progress."""
        self._watchdog.beat()
        if self.writes:
            self.screen.phase(name, done, total)

    def show_samples(self, step: int, groups: Sequence[JsonMapping]) -> None:
        """Prints a few samples of `groups`, rows of `log_rollouts`."""
        if self.writes:
            self.screen.samples(step, groups)

    def state(self) -> dict[str, int]:
        """Returns the cursor for the checkpoint, JSON-able: the number of this stage's lines in
        each file, and the last step.

        Flushes the files to the disk and closes them; the next line opens them again. Raises
        LogError for a changed file, and the errors of `check`.
        """
        if self.writes:
            self.check()
        for file in self._files.values():
            file.sync()
        return {name: file.count for name, file in self._files.items()} | {"step": self._last_step}

    def restore(self, state: Mapping[str, int] | None) -> None:
        """Returns to a cursor: removes this stage's lines of later steps (all for None), and keeps
        those of other stages.

        Raises LogError for missing lines, or prints a notice with `lost_log`.
        """
        state = state or {}
        self._last_step = state.get("step", 0)
        for name, file in self._files.items():
            lost = file.keep_until(self._last_step, state.get(name, 0))
            if not lost:
                continue
            lines = f"{lost} of the {state[name]} lines up to step {self._last_step}"
            what = f"{file.path} lacks {lines}"
            if not self.lost_log:
                remedy = "put the file back from a copy, or add --lost-log to go on without them"
                raise LogError(f"{what}, where the checkpoint is: {remedy}")
            self.note(f"{what}: the run goes on without them")
        for tracker in self._trackers:
            if isinstance(tracker, Board):
                tracker.go_on(self._last_step)
        self.screen.begin(self._last_step)

    def close(self) -> None:
        """Closes files and progress; may be called twice. Raises LogError if a file cannot be."""
        self._watchdog.close()
        self.screen.close()
        for tracker in self._trackers:
            tracker.close()
        for file in self._files.values():
            file.close()
