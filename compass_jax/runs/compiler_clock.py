"""The time spent in XLA's compiler, from JAX's monitoring events."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

import jax


class CompilerClock:
    """A clock of the main thread's waits for XLA's compiler.

    JAX calls listeners when a program has been lowered, which starts its compilation, and when it
    is compiled or loaded from the cache. Compilation in other threads costs the run no time until
    the main thread waits for it.
    """

    LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
    COMPILED = "/jax/core/compile/backend_compile_duration"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.programs = 0
        self._clock, self._done_s, self._since = clock, 0.0, math.nan

    def __call__(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Handles an event of JAX's monitoring."""
        if threading.current_thread() is not threading.main_thread():
            return
        if event == self.LOWERED:
            self._since = self._clock()
        elif event == self.COMPILED:
            self.programs += 1
            self._done_s += duration_secs
            self._since = math.nan

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts a wait of the main thread for a compilation in another thread."""
        self._since = began = self._clock()
        try:
            yield
        finally:
            self._done_s += self._clock() - began
            self._since = math.nan

    @property
    def busy_s(self) -> float:
        """Seconds of the current compilation, or 0."""
        return 0.0 if math.isnan(self._since) else self._clock() - self._since

    @property
    def seconds(self) -> float:
        """Seconds in total."""
        return self._done_s + self.busy_s


COMPILER = CompilerClock()
jax.monitoring.register_event_duration_secs_listener(COMPILER)
