"""The numbers of a run, and the only place that writes them: metrics.jsonl, rollouts.jsonl, TensorBoard, and a progress line.

A line of metrics.jsonl is {"stage": ..., "step": ..., "metrics": {name: number}}; a number that is not finite is null.
Steps count from 1: `log(step)` says that `step` steps of the stage are done.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

_WINDOW = 20  # steps over which the time left is estimated

# What the progress line shows, where a step has it: label, metrics that are added up, format.
_SHOWN = (
    ("loss", ("sft/loss",), "{:.3f}"),
    ("reward", ("reward/mean",), "{:.3f}"),
    ("zero-var", ("zero_variance/rate_all_right", "zero_variance/rate_all_wrong"), "{:.0%}"),
    ("waste", ("waste/frac_none",), "{:.0%}"),
    ("kl", ("policy/kl_k3",), "{:.1e}"),
    ("grad", ("grad_norm",), "{:.2f}"),
    ("lr", ("lr",), "{:.1e}"),
)
_RATES = ("train/tokens_per_s", "rollout/tokens_per_s")  # the first that a step has


class Telemetry:
    """Writes the metrics of one stage ("sft", "rl", ...) of a run.

    Every line is with the operating system before `log` returns, so `kill -9` loses none. `state()` goes into the
    checkpoint and `restore()` takes back what was logged after it, so that no step is ever logged twice.
    On a terminal a bar is drawn; elsewhere one line at most every `every_s` seconds, and one for the last step.
    Of several processes one writes; in the others (`writes` is False) nothing is recorded or shown.
    """

    def __init__(
        self, run_dir: str | os.PathLike, total_steps: int, stage: str, *, every_s: float = 10.0, console: Console | None = None, writes: bool = True
    ):
        self.run_dir, self.writes = Path(run_dir), writes
        if writes:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        self.total_steps = total_steps
        self.stage = stage
        self.every_s = every_s
        self.console = console or Console(file=sys.stdout, soft_wrap=True)
        self._files = {name: _Lines(self.run_dir / f"{name}.jsonl", stage) for name in ("metrics", "rollouts") if writes}
        self._last_step = 0
        self._board: Any = None
        self._bar: Progress | None = None
        self._times: deque[tuple[int, float]] = deque([(0, time.monotonic())], maxlen=_WINDOW + 1)
        self._shown_at = -math.inf

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of `step` and shows progress. Values are numbers, or arrays of one element."""
        if not self.writes:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._files["metrics"].append([{"stage": self.stage, "step": step, "metrics": finite}])
        self._log_board(step, numbers)
        self._last_step = step
        now = time.monotonic()
        self._times.append((step, now))
        self._show(step, numbers, now)

    def log_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Records samples (JSON-able rows) of `step` in rollouts.jsonl."""
        if not self.writes:
            return
        self._files["rollouts"].append([{"stage": self.stage, "step": step, **row} for row in rows])

    def note(self, text: str) -> None:
        """Prints a line above the progress."""
        if self.writes:
            self.console.print(text, highlight=False, markup=False)

    def state(self) -> dict[str, int]:
        """The cursor: lines of this stage in each file, and the last step. JSON-able, for the checkpoint.

        The files are closed, and opened again by the next line: a bucket's mount keeps what is in a closed file alone.
        """
        for file in self._files.values():
            file.close()
        return {name: file.count for name, file in self._files.items()} | {"step": self._last_step}

    def restore(self, state: Mapping[str, int] | None) -> None:
        """Back to a cursor: removes this stage's lines after it (all of them for None). Lines of other stages stay."""
        state = state or {}
        for name, file in self._files.items():
            file.rewind(state.get(name, 0))
        self._last_step = state.get("step", 0)
        self._close_board()
        self._times.clear()
        self._times.append((self._last_step, time.monotonic()))

    def close(self) -> None:
        """Closes the files and the progress bar; may be called twice."""
        for file in self._files.values():
            file.close()
        self._close_board()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _log_board(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._board is None:
            from tensorboardX import SummaryWriter  # here, because it is slow to import

            # Events of later steps, from before a kill, are hidden by TensorBoard itself.
            self._board = SummaryWriter(str(self.run_dir / "tb" / self.stage), purge_step=self._last_step + 1)
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def _close_board(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None

    def _show(self, step: int, numbers: Mapping[str, float], now: float) -> None:
        (first, then), span = self._times[0], self._times[-1][0] - self._times[0][0]
        left_s = (now - then) / span * (self.total_steps - step) if span > 0 and step > first else math.nan
        text = progress_text(numbers, left_s)
        if self.console.is_terminal and not self.console.is_dumb_terminal:  # a dumb one cannot redraw a line
            self._draw(step, text)
        elif now - self._shown_at >= self.every_s or step >= self.total_steps:
            self._shown_at = now
            self.note(f"{self.stage} {step}/{self.total_steps}  {text}")

    def _draw(self, step: int, text: str) -> None:
        if self._bar is None:
            columns = (TextColumn(self.stage), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.fields[text]}", markup=False))
            self._bar = Progress(*columns, console=self.console, auto_refresh=False)
            self._bar.add_task("", total=self.total_steps, text="")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=step, text=text, refresh=True)


def progress_text(metrics: Mapping[str, float], left_s: float) -> str:
    """One line of what a person watches: rate, time left (seconds; NaN is unknown), and the metrics of the step that are there."""
    parts = [f"{metrics[name]:,.0f} tok/s" for name in _RATES if name in metrics][:1]
    parts += [f"{duration(left_s)} left"] if math.isfinite(left_s) else []
    for label, names, form in _SHOWN:
        if all(name in metrics for name in names):
            parts.append(f"{label} {form.format(sum(metrics[name] for name in names))}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """42 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class _Lines:
    """An append-only JSONL file, shared by the stages of a run one after another. `count`: lines of this stage."""

    def __init__(self, path: Path, stage: str):
        self.path, self.stage = path, stage
        self._file: IO[bytes] | None = None
        self.count = 0
        if path.exists():
            self._repair()

    def append(self, rows: list[dict]) -> None:
        if self._file is None:
            self._file = open(self.path, "ab")  # noqa: SIM115 - stays open from step to step
        self._file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        self._file.flush()
        self.count += len(rows)

    def rewind(self, count: int) -> None:
        """Keeps the first `count` lines of this stage, and every line of another."""
        if self.count <= count:
            return
        self.close()
        kept, seen = [], 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            own = self._own(line)
            seen += own
            if not own or seen <= count:
                kept.append(line)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.write_bytes(b"".join(kept))
        os.replace(temporary, self.path)
        self.count = min(seen, count)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _repair(self) -> None:
        """Counts this stage's lines; a last line cut off by a kill is removed, so that the next does not run into it."""
        whole = 0
        with open(self.path, "rb+") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    file.truncate(whole)
                    break
                whole += len(line)
                self.count += self._own(line)

    def _own(self, line: bytes) -> bool:
        try:
            return json.loads(line).get("stage") == self.stage
        except ValueError:  # damaged by something else: no line of ours, and none to remove
            return False
