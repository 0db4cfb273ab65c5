"""Compilation during the first rollout: training programs compile in a thread while the rollout's
programs compile and run, so that the first step waits for neither.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable

from compass_jax.base.aliases import Tree
from compass_jax.base.programs import Program
from compass_jax.runs.compiler_clock import COMPILER


class CompileAhead:
    """Compiles programs in order in a thread; later calls reuse the compiled programs.

    A program that does not compile only ends the thread: the call that needs it raises the error.
    Results are unchanged, since the same programs are compiled as in the calls.
    """

    def __init__(self, programs: Iterable[Program]):
        self.compiled: list[str] = []  # names of programs
        self._programs = programs
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="compile-ahead")
        self._thread.start()

    def finish(self) -> None:
        """Waits for the program that is compiling; the remaining ones compile at their
        first call.
        """
        self._enough.set()
        with COMPILER.waiting():
            self._thread.join()

    def _run(self) -> None:
        results: dict[Program, Tree] = {}
        with contextlib.suppress(Exception):
            for program in self._programs:
                if self._enough.is_set():
                    return
                lowered = program.lower(results)
                results[program] = lowered.out_info
                lowered.compile()
                self.compiled.append(program.name)
