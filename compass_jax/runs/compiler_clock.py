"""How long the compiler takes, from what JAX tells of it."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

import jax


class CompilerClock:
    """How long the main thread has waited for XLA's compiler, and whether it does now.

    JAX tells listeners when a program has been lowered, which is when its compilation begins, and
    when it is compiled or was loaded from the cache. What other threads compile costs the run no
    time until the main thread waits for them.
    """

    LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
    COMPILED = "/jax/core/compile/backend_compile_duration"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.programs = 0
        self._clock, self._done_s, self._since = clock, 0.0, math.nan

    def __call__(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """JAX's listener."""
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
        """Around a wait of the main thread for what another one compiles."""
        self._since = began = self._clock()
        try:
            yield
        finally:
            self._done_s += self._clock() - began
            self._since = math.nan

    @property
    def busy_s(self) -> float:
        """Seconds of the compilation that is going on; 0 where none is."""
        return 0.0 if math.isnan(self._since) else self._clock() - self._since

    @property
    def seconds(self) -> float:
        """All of them."""
        return self._done_s + self.busy_s


COMPILER = CompilerClock()
jax.monitoring.register_event_duration_secs_listener(COMPILER)
