"""Execution of a function in a forked child process with a time limit."""

from __future__ import annotations

import mmap
import os
import select
import signal
from collections.abc import Callable
from typing import NamedTuple, NoReturn

PAGE_BYTES = 2**20  # only written pages take memory


class Ended(NamedTuple):
    """The end of a child: its exit code, whether it exceeded its time limit, and its output."""

    code: int | None  # None: it could not be killed and ends with this process
    late: bool
    output: bytes


def run_forked(work: Callable[[mmap.mmap], None], seconds: float) -> Ended:
    """Runs `work` in a forked child for at most `seconds`.

    The child writes its output into shared memory, so that it needs no descriptor, and output
    before a crash is preserved. An exception ends the child with exit code 70.

    work: writes to the memory map like to a file; bytes after a zero byte are ignored.
    """
    with mmap.mmap(-1, PAGE_BYTES) as page:
        child = os.fork()
        if child == 0:
            _work(work, page)
        timed_out = not _ends_within(child, seconds)
        code: int | None = None
        try:
            if timed_out:
                os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except (
            PermissionError
        ):  # without a process namespace, seccomp forbids signals to other processes
            pass
        return Ended(code, timed_out, page[: max(0, page.find(b"\0"))])


def _work(work: Callable[[mmap.mmap], None], page: mmap.mmap) -> NoReturn:
    code = 70
    try:
        work(page)
        code = 0
    finally:
        os._exit(code)


def _ends_within(child: int, seconds: float) -> bool:
    """Returns whether the child ends within `seconds`."""
    descriptor = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)
