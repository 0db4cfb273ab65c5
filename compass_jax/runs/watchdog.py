"""A watchdog, which ends a process that stands still.

A process that skips a collective, or that has died, leaves the others waiting in it for ever.
"""

from __future__ import annotations

import faulthandler

STDERR = 2  # the file descriptor


class Watchdog:
    """Ends the process with exit status 1, and the stacks of all its threads on stderr, where
    `beat` is not called for `seconds` (0: never). Its clock runs outside Python, so that it ends a
    process that waits in a collective, too. One at a time in a process.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.beat()

    def beat(self) -> None:
        """Starts the seconds anew."""
        if self._seconds:
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=STDERR)

    def close(self) -> None:
        """Stops the clock."""
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()
