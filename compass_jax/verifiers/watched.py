"""Work in a child process that is ended when its time is over, with the results it had by then."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from compass_jax.errors import CompassError
from compass_jax.verifiers import guards
from compass_jax.verifiers.program_tests import RowError

GRACE_S = 0.5  # the work sees its own time limit before it is ended
_SIGNS = {True: b"1", False: b"0", None: b"-"}
_ERROR = b"E"


class WatchedError(CompassError, RuntimeError):
    """The work could not be done, for a reason that lies outside of it."""


def watched(
    work: Callable[[], Iterator[bool | None]], seconds: float, stop_at_failure: bool = False
) -> list[bool | None]:
    """Returns what `work` yields in a child process until `seconds` are over, or the child crashes.

    Args:
        stop_at_failure: the first False is the last result.

    Raises RowError where the work raises it, and WatchedError for what else it raises, and where
    the child is killed from outside.
    """
    end = time.monotonic() + min(seconds + GRACE_S, guards.seconds_left())
    source, sink = os.pipe()
    own = os.getpid()
    child = os.fork()
    if child == 0:
        _work(work, sink, own, stop_at_failure)
    os.close(sink)
    try:
        said, late = _received(source, end)
    finally:
        os.close(source)
        ended = _end(child)
    signs, error, text = said.partition(_ERROR)
    if error:
        _raise(text)
    if not late and ended == -signal.SIGKILL:
        raise WatchedError("the process of the tests was killed; is memory short?")
    values = {sign[0]: value for value, sign in _SIGNS.items()}
    return [values[sign] for sign in signs]


def _work(
    work: Callable[[], Iterator[bool | None]], sink: int, parent: int, stop_at_failure: bool
) -> NoReturn:
    try:
        guards.die_with_parent()
        guards.limit_growth()
        if os.getppid() == parent:
            for result in work():
                os.write(sink, _SIGNS[result])
                if stop_at_failure and result is False:
                    break
    except BaseException as error:
        text = str(error) if isinstance(error, RowError) else traceback.format_exc()
        message = json.dumps([isinstance(error, RowError), text[-4000:]])
        with contextlib.suppress(OSError):
            os.write(sink, _ERROR + message.encode())
    finally:
        os._exit(0)


def _received(source: int, end: float) -> tuple[bytes, bool]:
    """Returns what comes through a pipe, and whether it was not closed in time."""
    said, poll = b"", select.poll()
    poll.register(source, select.POLLIN)
    while poll.poll(max(0.0, end - time.monotonic()) * 1000):
        if not (part := os.read(source, 2**16)):
            return said, False
        said += part
    return said, True


def _end(child: int) -> int | None:
    """Ends the child and returns its exit code; None where it ends later, with this process."""
    try:
        os.kill(child, signal.SIGKILL)
    except PermissionError:  # without a process namespace signals reach this process alone
        return None
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _raise(text: bytes) -> NoReturn:
    of_row, message = json.loads(text)
    if of_row:
        raise RowError(message)
    raise WatchedError(message)
