"""Compilation beside the first rollout: the compiler works on the training's programs while the
rollout's are compiled and run, so the first step does not wait for one after the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import Any

from compass_jax.programs import Program
from compass_jax.runs.compiler_clock import COMPILER


class CompileAhead:
    """Compiles programs in a thread of its own, in their order; a call finds what was compiled.

    A program that cannot be compiled ends the thread alone: the call that needs it says why. No
    number changes: what is compiled is what the call would compile.
    """

    def __init__(self, programs: Iterable[Program]):
        self.compiled: list[str] = []  # names of programs
        self._programs = programs
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="compile-ahead")
        self._thread.start()

    def finish(self) -> None:
        """Waits for the program that is being compiled; the rest is left to its first call."""
        self._enough.set()
        with COMPILER.waiting():
            self._thread.join()

    def _run(self) -> None:
        results: dict[Program, Any] = {}
        with contextlib.suppress(Exception):
            for program in self._programs:
                if self._enough.is_set():
                    return
                lowered = program.lower(results)
                results[program] = lowered.out_info
                lowered.compile()
                self.compiled.append(program.name)
