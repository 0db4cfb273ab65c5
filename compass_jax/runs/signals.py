"""A command's process: its streams, and SIGINT (Ctrl-C) and SIGTERM without a `RunState`."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, Self

NUMBERS = (signal.SIGINT, signal.SIGTERM)
STATUSES = tuple(128 + number for number in NUMBERS)


def prepare_streams() -> None:
    """Escapes characters that standard output and standard error cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # not every replacement can
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def hide_slow_compile_notes() -> None:
    """Keeps XLA's notes on compilations of more than two minutes ("Very slow compile?") off the
    screen, which shows the compiler's time itself. Call it before jax is imported.

    XLA logs them as errors. Its real ones are raised as exceptions, and fatal ones are printed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


class SignalHandler:
    """A context in which the main thread handles SIGINT and SIGTERM by `_handle`."""

    def __enter__(self) -> Self:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # no other thread may
            self._before = {number: signal.signal(number, self._handle) for number in NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class Ending(SignalHandler):
    """A context for a command that has nothing to save: a signal ends the process at once, with one
    line.

    It raises no exception, because one in a destructor or in a callback of another library would be
    swallowed, and the command would continue. The files are left as after `kill -9`, which every
    command must tolerate.
    """

    def __init__(self, name: str):
        self.name = name

    def _handle(self, number: int, frame: FrameType | None) -> None:
        words = f"{self.name}: ended by {signal.Signals(number).name}\n"
        with contextlib.suppress(OSError):
            os.write(2, words.encode())  # not print, which the signal may have interrupted
        leave(128 + number)


def finish(status: int) -> None:
    """Ends the process with this status as the interpreter does, waiting for threads and calling
    exit functions, but without the teardown of its objects, which takes a second after a training.
    Returns if the output cannot be flushed, which the interpreter then reports.

    multiprocessing ends its children in the same way.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # private
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def leave(status: int) -> None:
    """Ends the process at once with this status, after flushing its output.

    The interpreter's normal exit would wait for threads, and tear down objects that a thread in XLA
    still uses.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
            stream.flush()
    os._exit(status)
