"""A function in a forked child that is ended when its time is over."""

from __future__ import annotations

import mmap
import os
import select
import signal
from collections.abc import Callable
from typing import NamedTuple, NoReturn

PAGE_BYTES = 2**20  # takes memory as far as it is written


class Ended(NamedTuple):
    """The end of a child: its exit code, whether its time was over, and its text."""

    code: int | None  # None: it could not be killed, and ends with this process
    late: bool
    output: bytes


def run_forked(work: Callable[[mmap.mmap], None], seconds: float) -> Ended:
    """Runs `work` in a child of this process for at most `seconds`.

    Its text travels in memory that both share, so that the child needs no descriptor, and the text
    that it wrote before a crash is there. An exception ends the child with code 70.

    work: it writes into the memory as into a file; bytes after a zero are not read.
    """
    with mmap.mmap(-1, PAGE_BYTES) as page:
        child = os.fork()
        if child == 0:
            _work(work, page)
        late = not _waited(child, seconds)
        code: int | None = None
        try:
            if late:
                os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except PermissionError:  # without a process namespace signals reach this process alone
            pass
        return Ended(code, late, page[: max(0, page.find(b"\0"))])


def _work(work: Callable[[mmap.mmap], None], page: mmap.mmap) -> NoReturn:
    code = 70
    try:
        work(page)
        code = 0
    finally:
        os._exit(code)


def _waited(child: int, seconds: float) -> bool:
    """Returns whether the child ends within `seconds`."""
    descriptor = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)
