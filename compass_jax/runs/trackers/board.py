"""TensorBoard's event files, written by the calling thread.

tensorboardX's writer has a thread that sleeps by the wall clock. A clock that is set back ends the
thread, and the next flush waits for ever.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


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
        self._writer: Any = None

    def go_on(self, step: int) -> None:
        """Resumes after `step` steps: TensorBoard hides the events of later ones."""
        self.close()
        self.purge_step = step + 1

    def prepare(self) -> None:
        """Imports the writer in a thread: it imports torch, if installed, which takes seconds."""
        threading.Thread(target=_import_writers, name="board-imports").start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Records the numbers of `step`; they are flushed to the operating system."""
        if self.failed:
            return
        try:
            self._write(step, numbers)
        # a full disk, a missing folder, a missing library
        except Exception as error:
            self.failed = True
            self.close()
            self.tell(
                f"TensorBoard's files in {self.folder} cannot be written ({error}); the "
                "run goes on without them"
            )

    def close(self) -> None:
        """Closes the file; the next `log` opens another."""
        if self._writer is not None:
            with contextlib.suppress(OSError):  # every event was flushed when it was logged
                self._writer.close()
            self._writer = None

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # here: slow to import
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import scalar

        now = time.time()
        events = [Event(wall_time=now, step=step, summary=scalar(*x)) for x in numbers.items()]
        if self._writer is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            unique = f"{os.getpid()}.{time.monotonic_ns()}"  # unique among files of one second
            name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{unique}"
            self._writer = RecordWriter(str(self.folder / name))
            start = SessionLog(status=SessionLog.START)
            events.insert(0, Event(wall_time=now, file_version="brain.Event:2"))
            events.insert(1, Event(wall_time=now, step=self.purge_step, session_log=start))
        for event in events:
            self._writer.write(event.SerializeToString())
        self._writer.flush()


def _import_writers() -> None:
    with contextlib.suppress(Exception):  # the first `log` reports it
        importlib.import_module("tensorboardX.summary")
