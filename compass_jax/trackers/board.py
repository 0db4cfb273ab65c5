"""TensorBoard as a tracker: event files, written by the calling thread."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from compass_jax.trackers import events


class Board:
    """A writer of scalars into one folder. An error is reported once and disables only this
    tracker, since metrics.jsonl has every number.

    `purge_step`: TensorBoard hides events of earlier files from this step on (left by a kill).
    """

    def __init__(self, folder: Path, tell: Callable[[str], None], purge_step: int):
        self.folder = folder
        self.tell = tell
        self.purge_step = purge_step
        self.failed = False
        self._file: Path | None = None

    def go_on(self, step: int) -> None:
        """Resumes after `step` steps: TensorBoard hides the events of later ones."""
        self.close()
        self.purge_step = step + 1

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Records the numbers of `step`."""
        if self.failed:
            return
        try:
            self._write(step, numbers)
        except Exception as error:  # a full disk, a missing folder
            self.failed = True
            self.close()
            self.tell(
                f"TensorBoard's files in {self.folder} cannot be written ({error}); the "
                "run goes on without them"
            )

    def close(self) -> None:
        """Ends the file; the next `log` begins another."""
        self._file = None

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        now, data = time.time(), b""
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            unique = f"{os.getpid()}.{time.monotonic_ns()}"  # unique among files of one second
            name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{unique}"
            self._file = self.folder / name
            data = events.head(now, self.purge_step)
        with open(self._file, "ab") as file:
            file.write(data + events.scalars(now, step, numbers))
