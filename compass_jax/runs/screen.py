"""The screen output of a run: a header, the current phase, the numbers and a few samples.

On a terminal it is rich's progress, drawn twice a second; elsewhere plain lines, at most one every
few seconds.
"""

from __future__ import annotations

import math
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from compass_jax.base.aliases import Json, JsonMapping
from compass_jax.runs.compiler_clock import COMPILER, CompilerClock
from compass_jax.runs.progress import duration, progress_text

COLUMNS = 80  # columns of plain lines
WIDEST = 110
EVALUATION_PHASE = "evaluation"
_WINDOW = 20  # number of steps for the estimate of the time left
_SAMPLE_LINES = 3  # maximum lines of a sample's text, and of its reference
_QUESTION_LINES = 100  # of a question: as good as all


class Lines(Progress):
    """A stage's progress on a terminal: step, bar, phase, time left; the last step's numbers."""

    def __init__(self, console: Console, stage: str, total: int):
        self.numbers = ""
        doing = Column(no_wrap=True, overflow="ellipsis")
        super().__init__(
            TextColumn("{task.description} {task.completed}/{task.total}", markup=False),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[doing]}", markup=False, table_column=doing),
            console=console,
            auto_refresh=False,
        )
        self.task = self.add_task(stage, total=total, doing="")

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yields the lines."""
        yield from super().get_renderables()
        if self.numbers:
            yield Text(self.numbers, no_wrap=True)


class Screen:
    """The screen output of one stage of a run.

    Args:
        total: number of steps of the stage.
        every_s: minimum seconds between two plain lines.
    """

    def __init__(
        self,
        console: Console,
        stage: str,
        total: int,
        every_s: float,
        compiler: CompilerClock = COMPILER,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.console, self.stage, self.total, self.every_s = console, stage, total, every_s
        self._compiler, self._clock = compiler, clock
        self._step = 0
        self._numbers: dict[str, float] = {}
        self._fresh = False  # the numbers have not been printed yet
        self._phase: tuple[str, int, int] = ("starts", 0, 0)
        self._phase_since = self._shown_at = clock()
        self._times: deque[tuple[int, float]] = deque(maxlen=_WINDOW + 1)
        self._evaluated_s = 0.0  # seconds of work of evaluations, which no step takes
        self._evaluating_since: float | None = None
        self._lines: Lines | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def width(self) -> int:
        """Number of characters of a line."""
        return max(min(self.console.width, WIDEST), 40)

    # ---- output ----------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Prints a line above the progress; on a terminal a long one is wrapped and indented."""
        for line in text.splitlines() or [""]:
            parts = [line]
            if self.console.is_terminal:
                parts = textwrap.wrap(line, self.width, subsequent_indent="  ") or [""]
            for part in parts:
                self.console.print(part, highlight=False, markup=False, soft_wrap=True)

    def begin(self, step: int) -> None:
        """Starts, or resumes after `step` steps."""
        self._step, self._numbers = step, {}
        self._times.clear()
        self._times.append((step, self._worked()))

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Shows the current phase and its progress."""
        if name != self._phase[0]:
            self._phase_since = self._clock()
            self._end_evaluation()
            if name == EVALUATION_PHASE:
                self._evaluating_since = self._worked()
        self._phase = name, done, total
        if self._thread is None and not self._ended.is_set():
            self._thread = threading.Thread(target=self._watch, name="screen", daemon=True)
            self._thread.start()

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Shows the metrics of the last step."""
        self._step, self._numbers, self._fresh = step, dict(numbers), True
        self._phase_since = self._clock()
        self._end_evaluation()
        self._times.append((step, self._worked()))
        if self._drawn():
            self._draw()
        elif (
            self._clock() - self._shown_at >= self.every_s
            or step >= self.total
            or len(self._times) == 2  # the first one
        ):
            self._print(self._line(COLUMNS))

    def samples(self, step: int, groups: Sequence[JsonMapping]) -> None:
        """Prints a few samples of a step: the best, the worst, and a truncated one."""
        for line in sample_lines(step, groups, self.width):
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Stops drawing; may be called twice."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._lines is not None:
            self._lines.stop()
            self._lines = None

    # ---- drawing ---------------------------------------------------------------------------------

    def _worked(self) -> float:
        """Returns the seconds of work of steps: without the compiler's, since later steps compile
        little, and without those of evaluations.
        """
        return self._clock() - self._compiler.seconds - self._evaluated_s

    def _end_evaluation(self) -> None:
        if self._evaluating_since is not None:
            self._evaluated_s += self._worked() - self._evaluating_since
            self._evaluating_since = None

    @property
    def left_s(self) -> float:
        """Estimated seconds to the last step; NaN before the first one."""
        if len(self._times) < 2:
            return math.nan
        (first, then), (last, now) = self._times[0], self._times[-1]
        return (now - then) / max(last - first, 1) * (self.total - last)

    def _doing(self) -> str:
        """Returns "rollout 23 of 64, 41 s", or the compiler's activity. An evaluation also has its
        time left.
        """
        name, done, total = self._phase
        if (busy := self._compiler.busy_s) >= 1:
            return f"{name}: compiling, {duration(busy)}"
        share = f" {done} of {total}" if total else ""
        since = self._clock() - self._phase_since
        left = ""
        if name == EVALUATION_PHASE and 0 < done < total:
            left = f", {duration(since / done * (total - done))} left"
        return f"{name}{share}, {duration(since)}{left}"

    def _line(self, columns: int) -> str:
        begin = f"{self.stage} {self._step}/{self.total}  "
        if not self._numbers:
            return begin + self._doing()
        return begin + progress_text(self._numbers, self.left_s, columns - len(begin))

    def _drawn(self) -> bool:
        """Whether the terminal can redraw lines."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def _draw(self) -> None:
        left = f"  {duration(self.left_s)} left" if math.isfinite(self.left_s) else ""
        if self._lines is None:
            self._lines = Lines(self.console, self.stage, self.total)
            self._lines.start()
        if self._numbers:
            self._lines.numbers = progress_text(self._numbers, math.nan, self.width)
        doing = self._doing() + left
        self._lines.update(self._lines.task, completed=self._step, doing=doing, refresh=True)

    def _print(self, line: str) -> None:
        self._shown_at, self._fresh = self._clock(), False
        self.note(line)

    def _watch(self) -> None:
        """Draws while the main thread computes or compiles."""
        while not self._ended.wait(0.5):
            if self._drawn():
                self._draw()
            elif self._clock() - self._shown_at >= self.every_s:
                doing = f"{self.stage} {self._step}/{self.total}  {self._doing()}"[:COLUMNS]
                self._print(self._line(COLUMNS) if self._fresh else doing)


def sample_lines(step: int, groups: Sequence[JsonMapping], width: int) -> list[str]:
    """Returns the best, the worst and a truncated sample of logged groups: the question and its
    reference, once for samples of one group, and the first lines of the answer.
    """
    pairs = [(group, sample) for group in groups for sample in group["samples"]]
    judged = [x for x in pairs if x[1]["outcome"] == "ok"]
    chosen: list[tuple[str, Json]] = []
    if judged:
        best = max(judged, key=lambda x: x[1]["reward"])
        worst = min(judged, key=lambda x: x[1]["reward"])
        chosen.append(("best", best))
        if worst[1]["reward"] < best[1]["reward"]:
            chosen.append(("worst", worst))
    cut = next((x for x in pairs if x[1]["truncated"]), None)
    if cut and all(cut is not x for _, x in chosen):
        chosen.append(("truncated", cut))
    lines = [f"── samples of step {step} ".ljust(min(width, COLUMNS), "─")] if chosen else []
    last_group: JsonMapping | None = None
    for name, (group, sample) in chosen:
        lines.append(f"{name}: {verdict_text(sample)}, {sample['tokens']} tokens")
        if group is not last_group:
            lines += text_lines("prompt", group["prompt"], width, _QUESTION_LINES)
            if reference := str(group.get("answer", "")):
                lines += text_lines("truth", reference, width, _SAMPLE_LINES)
        lines += text_lines("answer", sample["response"], width, _SAMPLE_LINES)
        last_group = group
    return lines


def verdict_text(sample: JsonMapping) -> str:
    """Returns "reward 0.5" of a logged sample, or "no verdict (error)"."""
    if sample["outcome"] == "ok":
        return f"reward {sample['reward']:g}"
    error = f": {sample['error']}" if sample.get("error") else ""
    return f"no verdict ({sample['outcome']}{error})"


def text_lines(label: str, text: str, width: int, most: int) -> list[str]:
    """Returns `text` in at most `most` lines; control characters are escaped."""
    plain = "".join(x if x.isprintable() else " " if x.isspace() else repr(x)[1:-1] for x in text)
    room = width - 11
    parts = [plain[i : i + room] for i in range(0, len(plain), room)] or ["(empty)"]
    if len(parts) > most:
        parts = [*parts[:most]]
        parts[-1] = parts[-1][: room - 2] + " …"
    return [f"  {label if i == 0 else '':7}  {part}" for i, part in enumerate(parts)]
