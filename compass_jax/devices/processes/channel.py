"""Communication with child processes: JSON values over a connection, and execution of a function in
a forked child.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

from compass_jax.base.aliases import Json

OUTPUT_BYTES = 2**20  # maximum output of a forked child; only written pages take memory


class Channel:
    """A connection that carries JSON values. Only one thread may use it."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def send(self, value: Json) -> None:
        """Sends a JSON value. Raises OSError if the other end is closed."""
        self._connection.send_bytes(json.dumps(value).encode())

    def receive(self, seconds: float | None = None) -> Json:
        """Returns the next JSON value. Raises TimeoutError if none begins within `seconds`, and
        EOFError or OSError if the other end is closed.
        """
        if not self._connection.poll(seconds):
            raise TimeoutError("no answer in time")
        return json.loads(self._connection.recv_bytes())

    def close(self) -> None:
        """Closes this end. May be called twice."""
        self._connection.close()


class ExitStatus(NamedTuple):
    """The end of a child: its exit code, whether it exceeded its time limit, and its output."""

    code: int | None  # None: it could not be killed and ends with this process
    late: bool
    output: bytes


def run_forked(work: Callable[[mmap.mmap], None], seconds: float) -> ExitStatus:
    """Runs `work` in a forked child for at most `seconds`.

    The child writes its output into shared memory, so that it needs no descriptor, and output
    before a crash is preserved. An exception ends the child with exit code 70.

    work: writes to the memory map like to a file; bytes after a zero byte are ignored.
    """
    with mmap.mmap(-1, OUTPUT_BYTES) as page:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                work(page)
                code = 0
            finally:
                os._exit(code)
        late = not _ends_within(child, seconds)
        status: int | None = None
        # without a process namespace, seccomp forbids signals to other processes
        with contextlib.suppress(PermissionError):
            if late:
                os.kill(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return ExitStatus(status, late, page[: max(0, page.find(b"\0"))])


def _ends_within(child: int, seconds: float) -> bool:
    # A pidfd becomes readable when its process ends; waitpid has no timeout.
    descriptor = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)
