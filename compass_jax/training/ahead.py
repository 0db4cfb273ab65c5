"""Compilation before its programs are called: of a run with several processes before anything else,
so that what does not compile or fit costs no rollout; else during the first rollout, so that the
first step waits for neither.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator

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
        with contextlib.suppress(Exception):
            programs = itertools.takewhile(lambda _: not self._enough.is_set(), self._programs)
            self.compiled.extend(_compiled(programs))


def compile_first(programs: Iterable[Program], progress: Callable[[int], None]) -> None:
    """Compiles programs in order; `progress` gets the number of those that are compiled. Raises the
    error of one that does not compile or needs more memory than the devices have.
    """
    for number, _ in enumerate(_compiled(programs), 1):
        progress(number)


def _compiled(programs: Iterable[Program]) -> Iterator[str]:
    """Compiles programs; yields the name of each when it is compiled."""
    results: dict[Program, Tree] = {}
    for program in programs:
        lowered = program.lower(results)
        results[program] = lowered.out_info
        lowered.compile()
        yield program.name
