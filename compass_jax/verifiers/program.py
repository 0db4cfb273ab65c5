"""Execution of a program that the model wrote, with its tests in a separate process.

The program runs in a fresh interpreter without network, tests and expected values. The tests run in
another process, which calls the program's functions through a pipe. Only plain data is returned, so
that no object of the program can override `==`. Both processes are children of a reward worker's
sandbox (processes/sandbox.py) and inherit its guards; the program has tighter limits.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import math
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compass_jax.errors import CompassError
from compass_jax.processes import guards
from compass_jax.processes.channel import Channel, ChannelError
from compass_jax.processes.forked import run_forked
from compass_jax.verifiers import program_files
from compass_jax.verifiers.program_child import decode, encode
from compass_jax.verifiers.program_files import CHILD
from compass_jax.verifiers.program_tests import (
    IN_PLACE,
    NOT_PLAIN,
    RowError,
    RowTest,
    RowTests,
    Run,
    read_tests,
)

OUTPUT_BYTES = 2**20
FILE_BYTES = 16 * 2**20
GRACE_S = 0.5  # delay between the time limit of tests and the kill of their process
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


class WatchedError(CompassError, RuntimeError):
    """The tests could not run, for a reason outside of them."""


class ProgramFailed(CompassError):
    """The program ended, hung, or wrote malformed output; the message has the details."""


class StartsProcesses(ProgramFailed):
    """The program was killed when it started a process, which its limits forbid."""


class Program:
    """A program in a separate process, used as a context manager.

    Args:
        command: the file of a script; empty: requests come through a pipe (program_child.py).
        limits: resource limits; the program is killed if it exceeds them.

    Raises:
        OSError: no process could be started, in two attempts.
    """

    def __init__(self, command: list[str], limits: Limits):
        self._end = time.monotonic() + limits.seconds
        self._limits = limits
        self._process = _start_process(command, limits)
        assert self._process.stdin is not None and self._process.stdout is not None
        pipes = (self._process.stdout, self._process.stdin)
        reader, writer = (os.dup(pipe.fileno()) for pipe in pipes)
        self._channel = Channel(reader, writer, OUTPUT_BYTES)
        for pipe in pipes:
            pipe.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except PermissionError:  # no process namespace; it ends with this process
            return
        except ProcessLookupError:
            pass
        self._process.wait()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the program's answer to a request (program_child.py). Raises ProgramFailed."""
        with self._failures():
            self._channel.send(request, self._end)
            answer = self._channel.receive(self._end)
        if not isinstance(answer, dict):
            raise ProgramFailed("it wrote a malformed answer")
        return answer

    def output(self, text: str) -> str:
        """Returns the output for this input. Raises ProgramFailed if the exit code is not 0."""
        with self._failures():
            output = self._channel.read_all(text.encode(), self._end)
        if self._code() != 0:
            raise self._end_error()
        return output.decode(errors="replace")

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise ProgramFailed("it was not done in time") from error
        except EOFError as error:
            raise self._end_error() from error
        except ChannelError as error:
            raise ProgramFailed(f"it wrote a malformed answer: {error}") from error

    def _code(self) -> int | None:
        """Returns the exit code of a program that closed its output, or None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(max(0.0, self._end - time.monotonic()) + 0.2)
        return None

    def _end_error(self) -> ProgramFailed:
        code = self._code()
        if code == -signal.SIGSYS and self._limits.processes == 1:
            return StartsProcesses("it started a process")
        return ProgramFailed(f"it ended with code {code}")


def _start_process(command: list[str], limits: Limits) -> subprocess.Popen:
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
            [sys.executable, "-I", CHILD, program_files.importable(), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**_ENVIRONMENT, "HOME": os.getcwd(), "TMPDIR": os.getcwd()},
            preexec_fn=confine,
            start_new_session=True,
            bufsize=0,
        )

    try:
        return start()
    except (OSError, subprocess.SubprocessError):
        time.sleep(0.05)
        return start()


class Functions:
    """The functions of a loaded program, which tests call. Raises ProgramFailed if the program
    cannot be loaded.

    Args:
        in_place: whether all calls return the changes to their lists, sets and dicts; False: only
            calls whose result the test does not use.
    """

    def __init__(self, program: Program, tests: RowTests, text: str, in_place: bool = False):
        self._program, self._tests, self._in_place = program, tests, in_place
        self._text = tests.program(text)
        answer = program.ask({"load": self._text})
        names = answer.get("names")
        if not isinstance(names, list):
            raise ProgramFailed(f"it raised {answer.get('raised')}: {answer.get('text')}"[:500])
        self._claimed = [name for name in names if isinstance(name, str)]
        self._failure: ProgramFailed | None = None

    def passes(self, test: RowTest, number: int) -> bool:
        """Returns whether a test passes. After the program ended, hung or wrote malformed output,
        every test fails, even if a test catches the error.
        """
        if self._failure is not None:
            return False
        names = self._tests.namespace()
        run = Run(self._tests, test, names)
        visible = self._tests.visible(self._claimed, self._text, names)
        good = run.passes(number, {name: self._function(name, run) for name in visible})
        if isinstance(self._failure, StartsProcesses):
            raise self._failure
        return good and self._failure is None

    def _function(self, name: str, run: Run) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(run, name, args, kwargs, self._in_place)

        def changing(*args: Any, **kwargs: Any) -> Any:
            return self._call(run, name, args, kwargs, True)

        call.__name__ = name
        setattr(call, IN_PLACE, changing)
        return call

    def _call(
        self, run: Run, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], in_place: bool
    ) -> Any:
        run.calls += 1
        if self._failure is not None:
            raise self._failure
        try:
            request = [name, encode(list(args)), encode(kwargs), in_place]
        except TypeError as error:
            run.fault = RowError(NOT_PLAIN.format(error))
            raise run.fault from error
        except ValueError as error:
            run.failed = True
            raise ProgramFailed(f"it cannot be called: {error}") from error
        try:
            result = _result(self._program.ask({"call": request}), run.names)
        except ProgramFailed as error:
            self._failure = error
            raise
        except Exception as error:
            self._failure = ProgramFailed("it wrote a malformed answer")
            raise self._failure from error
        if isinstance(result, BaseException):
            run.raised = result
            run.failed = run.failed or isinstance(result, ProgramFailed)
            raise result
        value, after = result
        if in_place:
            for argument, changed in zip([*args, *kwargs.values()], after):
                _update(argument, changed)
        return value


def _result(
    answer: Mapping[str, Any], known: Mapping[str, Any]
) -> tuple[Any, list] | BaseException:
    """Returns the result of a call and its arguments after the call, or the exception that it
    raised.
    """
    if "raised" in answer:
        return _exception(answer, known)
    if "unsendable" in answer:
        return ProgramFailed(f"it returned no plain data: {answer['unsendable']!s:.200}")
    after = decode(answer["after"])
    if not isinstance(after, list):
        raise TypeError
    return decode(answer["value"]), after


def _update(argument: Any, changed: Any) -> None:
    if type(argument) is not type(changed):
        return
    if isinstance(argument, list):
        argument[:] = changed
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(changed)


def _exception(answer: Mapping[str, Any], known: Mapping[str, Any]) -> BaseException:
    """Returns the exception that the program claims to have raised. Its class is the first one that
    the row's setup or Python defines.
    """
    text = str(answer.get("text", ""))
    args = decode(answer["args"]) if "args" in answer else [text]
    names = [name for name in answer["raised"] if isinstance(name, str)]
    for name in names:
        kind = known.get(name, getattr(builtins, name, None))
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            continue
        if issubclass(kind, StopIteration | StopAsyncIteration):
            break  # as in a generator: it would end a test's loop
        with contextlib.suppress(Exception):
            return kind(*args)
    return RuntimeError(f"{names[:1]}: {text}")


def passed_functions(
    text: str, tests: RowTests, limits: Limits, in_place: bool = False
) -> Iterator[bool]:
    """Yields whether each test passes.

    If the program hangs, ends or crashes, the remaining tests fail. Raises RowError for a test that
    cannot run.
    """
    tests.namespace()
    try:
        with Program([], limits) as program:
            functions = Functions(program, tests, text, in_place)
            for number, test in enumerate(tests.tests, 1):
                yield functions.passes(test, number)
    except StartsProcesses:
        raise
    except ProgramFailed:
        return


def setup_faults(setups: Iterable[str], limits: Limits) -> dict[str, str]:
    """Returns the faults of setups that cannot run in the process of a program."""
    faults: dict[str, str] = {}
    left = list(setups)
    while left:
        with (
            contextlib.suppress(ProgramFailed),
            Program([], limits._replace(processes=guards.PROGRAM_PROCESSES)) as program,
        ):
            while left:
                setup = left.pop()
                faults[setup] = "setup ends the program that it stands before"
                answer = program.ask({"load": setup})
                del faults[setup]
                if "raised" in answer:
                    kind = (answer["raised"] or ["an error"])[0]
                    faults[setup] = (
                        f"setup raises {kind}: {answer.get('text', '')!s:.300} in a program's"
                        " process; mend it, or name the packages that it imports in"
                        " rewards.program_packages"
                    )
    return faults


def can_run() -> bool:
    """Returns whether a correct program passes its test in this process. If not, every response
    would get 0.
    """
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
            with Program(["program.py"], left) as program:
                yield _lines(program.output(stdin)) == _lines(output)
        except StartsProcesses:
            raise
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

    Args:
        stop_at_failure: whether to stop after the first False.

    Raises:
        RowError: the work raised it.
        WatchedError: the work raised another error, or the child was killed from outside.
    """
    parent = os.getpid()

    def write(page: mmap.mmap) -> None:
        try:
            guards.die_with_parent()
            guards.limit_growth()
            if os.getppid() == parent:
                _write_results(page, work, limits, stop_at_failure)
        except BaseException as error:
            text = str(error) if isinstance(error, RowError) else traceback.format_exc()
            message = json.dumps([isinstance(error, RowError), text[-4000:]])
            page.write(_ERROR + message.encode())

    end = run_forked(write, min(limits.seconds + GRACE_S, guards.seconds_left()))
    results, error, text = end.output.partition(_ERROR)
    if error:
        of_row, message = json.loads(text)
        raise RowError(message) if of_row else WatchedError(message)
    if not end.late and end.code == -signal.SIGKILL:
        raise WatchedError("the process of the tests was killed; is memory short?")
    return [result == ord("1") for result in results.rpartition(_AGAIN)[2]]


def _write_results(
    page: mmap.mmap,
    work: Callable[[Limits], Iterator[bool]],
    limits: Limits,
    stop_at_failure: bool,
) -> None:
    end = time.monotonic() + limits.seconds
    try:
        _write_until(page, work(limits), stop_at_failure)
    except StartsProcesses:
        page.write(_AGAIN)
        left = max(0.1, end - time.monotonic())
        several = limits._replace(seconds=left, processes=guards.PROGRAM_PROCESSES)
        _write_until(page, work(several), stop_at_failure)


def _write_until(page: mmap.mmap, results: Iterator[bool], stop_at_failure: bool) -> None:
    for result in results:
        page.write(b"1" if result else b"0")
        if stop_at_failure and not result:
            return


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
