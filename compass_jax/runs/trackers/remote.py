"""Trackers with a server, or with one database for all runs, each driven by one thread. The run
waits for a tracker only at its end, for at most CLOSE_S seconds.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from compass_jax.base.aliases import JsonMapping
from compass_jax.runs.trackers.services import Service

CLOSE_S = 60.0
Logged = tuple[int, Mapping[str, float]]


class Remote:
    """A tracker that sends the steps of one stage to a service, in order.

    A resumed run skips the steps that the service has, because it computes the same numbers again.
    An error is reported once, and the run continues.
    """

    def __init__(
        self,
        service: Service,
        run_dir: Path,
        stage: str,
        settings: JsonMapping,
        tell: Callable[[str], None],
    ):
        self.title = service.title
        self.log_file = run_dir / "metrics.jsonl"
        self.tell = tell
        self._open = partial(service.open, run_dir / "trackers", stage, settings, tell)
        self._work: queue.SimpleQueue[Logged | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Records the finite numbers of `step`."""
        if self._thread is None:
            name = f"tracker {self.title}"
            self._thread = threading.Thread(target=self._hand_over, name=name, daemon=True)
            self._thread.start()
        if self._thread.is_alive():
            self._work.put((step, numbers))

    def close(self) -> None:
        """Waits until the service has all numbers, for at most CLOSE_S seconds."""
        if self._thread is None:
            return
        self._work.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._gave_up(f"it did not take everything within {CLOSE_S:.0f} s")
        self._thread = None

    def _hand_over(self) -> None:
        try:
            run, last = self._open()
            while (logged := self._work.get()) is not None:
                step, numbers = logged
                if step > last:
                    finite = {name: x for name, x in numbers.items() if math.isfinite(x)}
                    run.log(finite, step=step)
                    last = step
            run.finish()
        except Exception as error:
            self._gave_up(" ".join(str(error).split())[:300] or type(error).__name__)

    def _gave_up(self, why: str) -> None:
        self.tell(
            f"{self.title}: {why}; the run goes on without it, and {self.log_file} has every number"
        )
