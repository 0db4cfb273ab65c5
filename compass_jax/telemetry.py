"""The numbers of a run, and the only place that writes them: metrics.jsonl, rollouts.jsonl,
TensorBoard, and a progress line.

A line of metrics.jsonl is {"stage": ..., "step": ..., "metrics": {name: number}}; a number that is
not finite is null. Steps count from 1: `log(step)` says that `step` steps of the stage are done.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from compass_jax.board import Board
from compass_jax.logfile import LogError, LogFile

_BAR = 10  # characters of the bar
_WINDOW = 20  # steps over which the time left is estimated

COLUMNS = 80  # of the progress line
# What the progress line shows, where a step has it: label, metric, format. Where they do not all
# fit, the last ones go first, then the rate and the time left.
_SHOWN = (
    ("loss", "sft/loss", "{:.3f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("kl", "policy/kl_k3", "{:.1e}"),
    ("grad", "grad_norm", "{:.2f}"),
    ("lr", "lr", "{:.1e}"),
)
_ALWAYS = 2  # of these are never left out
# what the tokens of a step learnt from: their shares are one part of the line
_SIGNALS = {
    "verifier": "waste/frac_verifier_signal",
    "shaping": "waste/frac_shaping_signal",
    "entropy": "waste/frac_entropy_signal",
    "none": "waste/frac_none",
}
_RATES = ("train/tokens_per_s", "rollout/tokens_per_s")  # the first that a step has


class Telemetry:
    """Writes the metrics of one stage ("sft", "rl", ...) of a run.

    Every line is with the operating system before `log` returns, so `kill -9` loses none. `state()`
    goes into the checkpoint and `restore()` takes back what was logged after it, so that no step is
    ever logged twice. What a checkpoint counts is on the disk before it; where lines of it are
    missing later, `restore` is an error unless `lost_log` says that they may be. `check` is called
    before anything is written: it raises where the run directory is no longer the run's. On a
    terminal a bar is drawn; elsewhere one line at most every `every_s` seconds, and one for the
    last step. Of several processes one writes; in the others (`writes` is False) nothing is
    recorded or shown.
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
    ):
        self.run_dir = Path(run_dir)
        self.writes = writes
        if writes:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        self.total_steps = total_steps
        self.stage = stage
        self.every_s = every_s
        self.console = console or Console(file=sys.stdout, soft_wrap=True)
        self.check = check
        self.lost_log = lost_log
        names = ("metrics", "rollouts") if writes else ()
        self._files = {name: LogFile(self.run_dir / f"{name}.jsonl", stage) for name in names}
        self._last_step = 0
        self._board = Board(self.run_dir / "tb" / stage, self.note, 1)
        self._bar: Progress | None = None
        self._times: deque[tuple[int, float]] = deque([(0, time.monotonic())], maxlen=_WINDOW + 1)
        self._shown_at = -math.inf

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(LogError):  # the error that ends the run says it already
            self.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of `step` and shows progress. Values are numbers, or arrays of one
        element.
        """
        if not self.writes:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self.check()
        self._files["metrics"].append([{"stage": self.stage, "step": step, "metrics": finite}])
        self._board.log(step, numbers)
        self._last_step = step
        now = time.monotonic()
        self._times.append((step, now))
        self._show(step, numbers, now)

    def log_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Records samples (JSON-able rows) of `step` in rollouts.jsonl."""
        if not self.writes:
            return
        self.check()
        self._files["rollouts"].append([{"stage": self.stage, "step": step, **row} for row in rows])

    def note(self, text: str) -> None:
        """Prints a line above the progress."""
        if self.writes:
            self.console.print(text, highlight=False, markup=False)

    def state(self) -> dict[str, int]:
        """The cursor: lines of this stage in each file, and the last step. JSON-able, for the
        checkpoint.

        All of them are on the disk then. The files are closed, and opened again by the next line.
        Raises LogError where a file is not as it was written, and whatever `check` does.
        """
        if self.writes:
            self.check()
        for file in self._files.values():
            file.sync()
        return {name: file.count for name, file in self._files.items()} | {"step": self._last_step}

    def restore(self, state: Mapping[str, int] | None) -> None:
        """Back to a cursor: removes this stage's lines of later steps (all for None). Lines of
        other stages stay.

        Raises LogError where lines of it are missing, unless `lost_log` was given: that they are
        lost is told then.
        """
        state = state or {}
        self._last_step = state.get("step", 0)
        for name, file in self._files.items():
            lost = file.keep_until(self._last_step, state.get(name, 0))
            if not lost:
                continue
            what = (
                f"{file.path} lacks {lost} of the {state[name]} lines up to step {self._last_step}"
            )
            if not self.lost_log:
                remedy = "put the file back from a copy, or add --lost-log to go on without them"
                raise LogError(f"{what}, where the checkpoint is: {remedy}")
            self.note(f"{what}: the run goes on without them")
        self._board.close()
        self._board.purge_step = self._last_step + 1
        self._times.clear()
        self._times.append((self._last_step, time.monotonic()))

    def close(self) -> None:
        """Closes the files and the progress bar; may be called twice. Raises LogError where a file
        could not be kept.
        """
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._board.close()
        for file in self._files.values():
            file.close()

    def _show(self, step: int, numbers: Mapping[str, float], now: float) -> None:
        (first, then), span = self._times[0], self._times[-1][0] - self._times[0][0]
        left_s = (
            (now - then) / span * (self.total_steps - step)
            if span > 0 and step > first
            else math.nan
        )
        # a dumb one cannot redraw a line
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            counter = len(f"{self.stage}  {self.total_steps}/{self.total_steps} ")
            room = self.console.width - counter - _BAR - 1
            self._draw(step, progress_text(numbers, left_s, room))
        elif now - self._shown_at >= self.every_s or step >= self.total_steps:
            self._shown_at = now
            begin = f"{self.stage} {step}/{self.total_steps}  "
            self.note(begin + progress_text(numbers, left_s, COLUMNS - len(begin)))

    def _draw(self, step: int, text: str) -> None:
        if self._bar is None:
            columns = (
                TextColumn(self.stage),
                BarColumn(bar_width=_BAR),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}", markup=False),
            )
            self._bar = Progress(*columns, console=self.console, auto_refresh=False)
            self._bar.add_task("", total=self.total_steps, text="")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=step, text=text, refresh=True)


def progress_text(metrics: Mapping[str, float], left_s: float, columns: int = COLUMNS) -> str:
    """One line of what a person watches, of at most `columns` characters where that is possible:
    rate, time left (seconds; NaN is unknown), the metrics of the step that are there, and from what
    its tokens learnt.
    """
    rate = [f"{metrics[name]:,.0f} tok/s" for name in _RATES if name in metrics][:1]
    left = [f"{duration(left_s)} left"] if math.isfinite(left_s) else []
    main = [_part(metrics, *entry) for entry in _SHOWN[:_ALWAYS]] + [_signals(metrics)]
    more = [_part(metrics, *entry) for entry in _SHOWN[_ALWAYS:]]
    main, more = ([part for part in parts if part] for parts in (main, more))
    while len(text := "  ".join([*rate, *left, *main, *more])) > columns:
        shrinks = more or rate or left
        if not shrinks:
            break
        shrinks.pop()
    return text


def _part(metrics: Mapping[str, float], label: str, name: str, form: str) -> str:
    return f"{label} {form.format(metrics[name])}" if name in metrics else ""


def _signals(metrics: Mapping[str, float]) -> str:
    """ "verifier 59% entropy 30% none 11%"; shaping where there is any."""
    shares = {label: metrics[name] for label, name in _SIGNALS.items() if name in metrics}
    if not shares.get("shaping"):
        shares.pop("shaping", None)
    return " ".join(f"{label} {share:.0%}" for label, share in shares.items())


def duration(seconds: float) -> str:
    """42 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
