"""A limit of processor time for checks whose cost an answer decides, such as a pattern's."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from compass_jax.base.errors import CompassError

CHECK_S = 1.0  # of processor time, so that a busy machine wrongs no answer
_AGAIN_S = 0.1  # the signal repeats, because destructors swallow exceptions


class OutOfTime(CompassError, RuntimeError):
    """A check took more processor time than its limit."""


@contextmanager
def processor_time() -> Iterator[None]:
    """Returns a context that raises OutOfTime after CHECK_S of this process's processor time.

    Only a main thread can be interrupted; in others there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"more than {CHECK_S:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, CHECK_S, _AGAIN_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
