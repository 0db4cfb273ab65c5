"""What SIGINT (Ctrl-C) and SIGTERM do to a command outside of the rooms that stop in their own way
(`StopSignal`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)
STATUSES = tuple(128 + number for number in NUMBERS)


class Ending:
    """Around a command that has nothing to save: a signal ends the process at once, with one line.

    No exception is raised: one that comes up in a destructor or in a callback of another library
    is swallowed there, and the command goes on. What is on the disk is as after `kill -9`, which
    every command has to bear anyway.
    """

    def __init__(self, name: str):
        self.name = name
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Ending:
        if threading.current_thread() is threading.main_thread():  # no other may
            self._before = {number: signal.signal(number, self._handle) for number in NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        words = f"{self.name}: ended by {signal.Signals(number).name}\n"
        with contextlib.suppress(OSError):
            os.write(2, words.encode())  # not print: it may be what was interrupted
        leave(128 + number)


def leave(status: int) -> None:
    """Ends the process at once with this status, after what was printed has been written.

    The interpreter's own end would wait for threads, and tear down what a thread in XLA still uses.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
            stream.flush()
    os._exit(status)
