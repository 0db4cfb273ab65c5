"""What a person sees of a run: a header, what it is doing now and since when, its numbers, a few
samples. On a terminal rich's progress, drawn again twice a second; elsewhere plain lines, at most
one every few seconds.
"""

from __future__ import annotations

import math
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from compass_jax.runs.compiler_clock import COMPILER, CompilerClock
from compass_jax.runs.progress import duration, progress_text

COLUMNS = 80  # that everything fits; a wider terminal gets wider lines
WIDEST = 110
_WINDOW = 20  # steps over which the time left is estimated
_SAMPLE_LINES = 3  # of a sample's text


class Lines(Progress):
    """The progress of a stage on a terminal: step, bar, what the run does and the time left in one
    line, and the last step's numbers in another.
    """

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
    """The lines of one stage of a run.

    Args:
        total: steps of the stage.
        every_s: between two lines where nothing can be drawn again.
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
        self._lines: Lines | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def width(self) -> int:
        """Of a line."""
        return max(min(self.console.width, WIDEST), 40)

    # ---- what is told ----------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """A line above the progress; on a terminal a long one is broken between words and
        indented.
        """
        for line in text.splitlines() or [""]:
            parts = [line]
            if self.console.is_terminal:
                parts = textwrap.wrap(line, self.width, subsequent_indent="  ") or [""]
            for part in parts:
                self.console.print(part, highlight=False, markup=False, soft_wrap=True)

    def begin(self, step: int) -> None:
        """The run goes on after `step` steps."""
        self._step, self._numbers = step, {}
        self._times.clear()
        self._times.append((step, self._worked()))

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """What the run does now, and how much of it is done."""
        if name != self._phase[0]:
            self._phase_since = self._clock()
        self._phase = name, done, total
        if self._thread is None and not self._ended.is_set():
            self._thread = threading.Thread(target=self._watch, name="screen", daemon=True)
            self._thread.start()

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """`step` steps are done; `numbers` are the last one's metrics."""
        self._step, self._numbers, self._fresh = step, dict(numbers), True
        self._phase_since = self._clock()
        self._times.append((step, self._worked()))
        if self._drawn():
            self._draw()
        elif (
            self._clock() - self._shown_at >= self.every_s
            or step >= self.total
            or len(self._times) == 2  # the first one
        ):
            self._print(self._line(COLUMNS))

    def samples(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """A few samples of a step as text: the best, the worst, and one that was cut."""
        for line in sample_lines(step, groups, self.width):
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is drawn afterwards; may be called twice."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._lines is not None:
            self._lines.stop()
            self._lines = None

    # ---- what is drawn ---------------------------------------------------------------------------

    def _worked(self) -> float:
        """A clock that stands still while XLA compiles: the next steps compile little."""
        return self._clock() - self._compiler.seconds

    @property
    def left_s(self) -> float:
        """Seconds to the last step as the last ones went; NaN where none is done."""
        if len(self._times) < 2:
            return math.nan
        (first, then), (last, now) = self._times[0], self._times[-1]
        return (now - then) / max(last - first, 1) * (self.total - last)

    def _doing(self) -> str:
        """ "rollout 23 of 64, 41 s", or what the compiler does."""
        name, done, total = self._phase
        if (busy := self._compiler.busy_s) >= 1:
            return f"{name}: compiling, {duration(busy)}"
        share = f" {done} of {total}" if total else ""
        return f"{name}{share}, {duration(self._clock() - self._phase_since)}"

    def _line(self, columns: int) -> str:
        begin = f"{self.stage} {self._step}/{self.total}  "
        if not self._numbers:
            return begin + self._doing()
        return begin + progress_text(self._numbers, self.left_s, columns - len(begin))

    def _drawn(self) -> bool:
        """Whether lines can be drawn again; on a dumb terminal they cannot."""
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
        """Shows that the run is alive while it computes: the main thread may be in the compiler."""
        while not self._ended.wait(0.5):
            if self._drawn():
                self._draw()
            elif self._clock() - self._shown_at >= self.every_s:
                doing = f"{self.stage} {self._step}/{self.total}  {self._doing()}"[:COLUMNS]
                self._print(self._line(COLUMNS) if self._fresh else doing)


def sample_lines(step: int, groups: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """The best, the worst and a truncated sample of logged groups, a few lines each."""
    found = [(group, sample) for group in groups for sample in group["samples"]]
    known = [x for x in found if x[1]["outcome"] == "ok"]
    shown: list[tuple[str, Any]] = []
    if known:
        best = max(known, key=lambda x: x[1]["reward"])
        worst = min(known, key=lambda x: x[1]["reward"])
        shown.append(("best", best))
        if worst[1]["reward"] < best[1]["reward"]:
            shown.append(("worst", worst))
    cut = next((x for x in found if x[1]["truncated"]), None)
    if cut and all(cut is not x for _, x in shown):
        shown.append(("truncated", cut))
    lines = [f"── samples of step {step} ".ljust(min(width, COLUMNS), "─")] if shown else []
    for name, (group, sample) in shown:
        head = f"{name}: {verdict_text(sample)}, {sample['tokens']} tokens"
        lines += [head, *text_lines("prompt", group["prompt"], width, 1)]
        lines += text_lines("answer", sample["response"], width, _SAMPLE_LINES)
    return lines


def verdict_text(sample: Mapping[str, Any]) -> str:
    """ "reward 0.5" of a logged sample; "no verdict (error)" of one without."""
    if sample["outcome"] == "ok":
        return f"reward {sample['reward']:g}"
    error = f": {sample['error']}" if sample.get("error") else ""
    return f"no verdict ({sample['outcome']}{error})"


def text_lines(label: str, text: str, width: int, most: int) -> list[str]:
    """`text` in at most so many lines; characters that would move the cursor are spelt."""
    plain = "".join(x if x.isprintable() else " " if x.isspace() else repr(x)[1:-1] for x in text)
    room = width - 11
    parts = [plain[i : i + room] for i in range(0, len(plain), room)] or ["(empty)"]
    if len(parts) > most:
        parts = [*parts[:most]]
        parts[-1] = parts[-1][: room - 2] + " …"
    return [f"  {label if i == 0 else '':7}  {part}" for i, part in enumerate(parts)]
