"""Execution of a program that the model wrote, with its tests in a separate process.

The program runs in a fresh interpreter without network, tests and expected values. The tests run in
another process, which calls the program's functions through a pipe. Only plain data is returned, so
that no object of the program can override `==`. Both processes are children of a reward worker's
sandbox (devices/processes/sandbox.py) and inherit its guards; the program has tighter limits.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compass_jax.base.aliases import JsonMapping, JsonObject
from compass_jax.devices.processes import guards
from compass_jax.devices.processes.channel import run_forked
from compass_jax.rewards.verifiers import program_files
from compass_jax.rewards.verifiers.program_files import CHILD
from compass_jax.rewards.verifiers.program_objects import (
    ProgramFailed,
    RowError,
    StartsProcesses,
)
from compass_jax.rewards.verifiers.program_run import Run
from compass_jax.rewards.verifiers.program_tests import RowTests, read_tests

OUTPUT_BYTES = 2**20
ANSWER_BYTES = 8 * 2**20
FILE_BYTES = 16 * 2**20
# marks among the results: an error message follows; all tests start again
_ERROR, _AGAIN = b"E", b"-"
_ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class Limits(NamedTuple):
    """Resource limits of a program."""

    seconds: float = 3.0  # wall clock, for all requests together
    memory_mb: int = 512  # address space, for all its processes together
    processes: int = 1


class Program:
    """A program in a separate process, used as a context manager: a script with `text` as its
    input, or a program that answers requests (program_child.py).

    Nothing here limits its time: `passed` kills the process that waits for it, and the program ends
    with that process. Raises OSError if no process could be started, in two attempts.
    """

    has_run = False  # whether this process has started a program

    def __init__(self, limits: Limits, script: str = "", text: str = ""):
        self._limits = limits
        with contextlib.ExitStack() as stack:
            stdin: Any = subprocess.PIPE
            if script:
                stdin = stack.enter_context(tempfile.TemporaryFile())
                stdin.write(text.encode())
                stdin.seek(0)
            self._process = _start_process(script, stdin, limits)
        Program.has_run = True

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # unsent data to a program that ended
                if pipe is not None:
                    pipe.close()
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except PermissionError:  # no process namespace; it ends with this process
            return
        except ProcessLookupError:
            pass
        self._process.wait()

    def ask(self, request: JsonMapping) -> JsonObject:
        """Returns the program's answer to a request (program_child.py). Raises ProgramFailed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # a program that ended
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline(ANSWER_BYTES)
        if not line.endswith(b"\n") and len(line) < ANSWER_BYTES:
            raise self._end_error()
        answer = None
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ProgramFailed("it wrote a malformed answer")
        return answer

    def output(self) -> str:
        """Returns the output of a script. Raises ProgramFailed if its exit code is not 0."""
        assert self._process.stdout is not None
        output = self._process.stdout.read(OUTPUT_BYTES + 1)
        if len(output) > OUTPUT_BYTES:
            raise ProgramFailed("it wrote too much")
        if self._process.wait() != 0:
            raise self._end_error()
        return output.decode(errors="replace")

    def _end_error(self) -> ProgramFailed | StartsProcesses:
        code = self._process.wait()
        if code == -signal.SIGSYS and self._limits.processes == 1:
            return StartsProcesses("it started a process")
        return ProgramFailed(f"it ended with code {code}")


def _start_process(script: str, stdin: Any, limits: Limits) -> subprocess.Popen:
    def confine() -> None:
        guards.die_with_parent()
        with contextlib.suppress(OSError):  # a machine without this guard is rejected earlier
            guards.signal_nobody_else()
        memory = limits.memory_mb * 2**20
        if not guards.confine_program(limits.processes):
            memory //= guards.PROGRAM_PROCESSES
        guards.set_limits(
            {
                resource.RLIMIT_AS: memory // limits.processes,
                resource.RLIMIT_CPU: math.ceil(limits.seconds) + 1,
                resource.RLIMIT_FSIZE: FILE_BYTES,
            }
        )

    def start() -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-I", CHILD, program_files.importable(), *filter(None, [script])],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**_ENVIRONMENT, "HOME": os.getcwd(), "TMPDIR": os.getcwd()},
            preexec_fn=confine,
            start_new_session=True,
        )

    try:
        return start()
    except (OSError, subprocess.SubprocessError):
        time.sleep(0.05)
        return start()


def passed_functions(
    text: str, tests: RowTests, limits: Limits, in_place: bool = False
) -> Iterator[bool]:
    """Yields whether each test passes, until the program cannot be loaded. Raises RowError for a
    test that cannot run.
    """
    tests.namespace()
    text = tests.program(text)
    with contextlib.suppress(ProgramFailed), Program(limits) as program:
        run = Run(tests, program.ask, in_place)
        run.load(text)
        for number in range(1, len(tests.tests) + 1):
            yield run.passes(number)


def setup_fault(setup: str) -> str:
    """Returns the fault of a setup that cannot run in the process of a program; empty otherwise."""
    if not setup:
        return ""
    limits = Limits(60.0, processes=guards.PROGRAM_PROCESSES)
    try:
        with Program(limits) as program:
            answer = program.ask({"load": setup, "classes": []})
    except ProgramFailed:
        return "setup ends the program that it stands before"
    if "raised" not in answer:
        return ""
    kind = (answer["raised"] or ["an error"])[0]
    return (
        f"setup raises {kind}: {answer.get('text', '')!s:.300} in a program's process; mend it, or"
        " name the packages that it imports in rewards.program_packages"
    )


def can_run() -> bool:
    """Returns whether a correct program passes its test here. If not, every reward is 0."""
    tests = read_tests(["assert f() == 1"])
    return list(passed_functions("def f(): return 1", tests, Limits(seconds=30.0))) == [True]


def passed_outputs(
    text: str, inputs: Sequence[str], outputs: Sequence[str], limits: Limits
) -> Iterator[bool]:
    """Yields whether the program, started once per input, writes the expected output. White space
    at the end of lines and of the output is ignored.
    """
    end = time.monotonic() + limits.seconds
    Path("program.py").write_text(text, encoding="utf-8", errors="replace")
    for stdin, output in zip(inputs, outputs, strict=True):
        left = limits._replace(seconds=end - time.monotonic())
        if left.seconds <= 0:
            return
        try:
            with Program(left, "program.py", stdin) as program:
                yield _lines(program.output()) == _lines(output)
        except ProgramFailed:
            yield False


def passed(
    work: Callable[[Limits], Iterator[bool]], limits: Limits, stop_at_failure: bool = False
) -> list[bool]:
    """Returns the results of `work`, which runs programs within limits. Results that are not ready
    in time are omitted.

    The work runs in a child process, because a program's result may keep a test busy or crash the
    process. If a program starts a process, `work` is restarted with `limits` for several processes,
    which share the memory limit.

    Raises RowError if the work does, and RuntimeError if it raised another error before a program
    began, or the child was killed from outside. Errors after that may be the program's doing (its
    folder, its processes, its answers), and it fails the remaining tests.
    """
    parent = os.getpid()

    def write(page: mmap.mmap) -> None:
        try:
            guards.die_with_parent()
            guards.limit_growth()
            Program.has_run = False
            if os.getppid() == parent:
                _write_results(page, work, limits, stop_at_failure)
        except BaseException as error:
            of_row = isinstance(error, RowError)
            if of_row or not Program.has_run:
                text = str(error) if of_row else traceback.format_exc()
                page.write(_ERROR + json.dumps([of_row, text[-4000:]]).encode())

    end = run_forked(write, min(limits.seconds, guards.seconds_left()))
    results, error, text = end.output.partition(_ERROR)
    if error:
        of_row, message = json.loads(text)
        raise RowError(message) if of_row else RuntimeError(message)
    if not end.late and end.code == -signal.SIGKILL:
        raise RuntimeError("the process of the tests was killed; is memory short?")
    return [result == ord("1") for result in results.rpartition(_AGAIN)[2]]


def _write_results(
    page: mmap.mmap,
    work: Callable[[Limits], Iterator[bool]],
    limits: Limits,
    stop_at_failure: bool,
) -> None:
    end = time.monotonic() + limits.seconds
    try:
        for result in work(limits):
            page.write(b"1" if result else b"0")
            if stop_at_failure and not result:
                return
    except StartsProcesses:
        page.write(_AGAIN)
        left = max(0.1, end - time.monotonic())
        several = limits._replace(seconds=left, processes=guards.PROGRAM_PROCESSES)
        _write_results(page, work, several, stop_at_failure)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
