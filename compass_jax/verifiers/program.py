"""A program that a model wrote, and its tests: two processes, so that neither can be the other.

The program runs in a fresh interpreter without a network, which knows no test and no expected
value; the tests run in the process that judges, and call the program's functions through a pipe.
Only plain data comes back, so that nothing in it can answer `==` for itself. Both are children of a
reward worker's (rewards/sandbox.py), whose guards hold for them; the program has narrower limits.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compass_jax.errors import CompassError
from compass_jax.verifiers import guards
from compass_jax.verifiers.program_child import decode, encode

OUTPUT_BYTES = 2**20
FILE_BYTES = 16 * 2**20
_ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
CHILD = str(Path(__file__).with_name("program_child.py"))


class Limits(NamedTuple):
    """What a program may use."""

    seconds: float = 3.0  # of wall clock, for all that is asked of it
    memory_mb: int = 512  # of address space


class ProgramFailed(CompassError):
    """The program ended, hung, or said what is no answer. Its message says which."""


class Program:
    """A program in a process of its own, for a `with` block.

    Args:
        command: of the interpreter, after `python -I`.
        limits: it is ended when they are over.

    Raises OSError where no process can be had, tried twice.
    """

    def __init__(self, command: list[str], limits: Limits):
        self._deadline = time.monotonic() + limits.seconds
        self._process = _started(command, limits)
        self._buffer = b""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe and pipe.close()
        self._process.wait()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What the child says to a request (program_child.py). Raises ProgramFailed."""
        text = self._exchange(json.dumps(request).encode() + b"\n", lambda got: b"\n" in got)
        line, _, self._buffer = text.partition(b"\n")
        try:
            said = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ProgramFailed("it wrote what is no answer") from error
        if not isinstance(said, dict):
            raise ProgramFailed("it wrote what is no answer")
        return said

    def output(self, given: str) -> str:
        """All that it writes, given this input. Raises ProgramFailed unless it ends with 0."""
        found = self._exchange(given.encode(), lambda got: False, closes=True)
        code = self._process.wait(max(0.0, self._deadline - time.monotonic()) + 1.0)
        if code != 0:
            raise ProgramFailed(f"it ended with code {code}")
        return found.decode(errors="replace")

    def _exchange(self, sent: bytes, done: Callable[[bytes], bool], closes: bool = False) -> bytes:
        """Writes `sent` and reads until `done`, or to the end of its output where it `closes`."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        poll, got = select.poll(), self._buffer
        poll.register(stdout, select.POLLIN)
        poll.register(stdin, select.POLLOUT)
        while not done(got):
            left = self._deadline - time.monotonic()
            ready = dict(poll.poll(max(0.0, left) * 1000))
            if not ready:
                raise ProgramFailed("it was not done in time")
            if stdin.fileno() in ready if not stdin.closed else False:
                sent = _written(stdin.fileno(), sent)
                if not sent:
                    poll.unregister(stdin)
                    if closes:
                        stdin.close()
            if stdout.fileno() in ready:
                part = os.read(stdout.fileno(), 2**16)
                got += part
                if len(got) > OUTPUT_BYTES:
                    raise ProgramFailed(f"it wrote more than {OUTPUT_BYTES:,} bytes")
                if not part:
                    if closes:
                        return got
                    raise ProgramFailed("it ended")
        return got


def _written(pipe: int, sent: bytes) -> bytes:
    """What of `sent` is left; nothing where nobody reads any more."""
    try:
        return sent[os.write(pipe, sent[: 2**16]) :]
    except BlockingIOError:
        return sent
    except BrokenPipeError:
        return b""


def _started(command: list[str], limits: Limits) -> subprocess.Popen:
    def confine() -> None:
        guards.die_with_parent()
        with contextlib.suppress(OSError):  # without this guard the verifier is refused before
            guards.signal_nobody_else()
        guards.narrow(os.getcwd(), [CHILD])
        cpu = math.ceil(limits.seconds) + 1
        wanted = {
            resource.RLIMIT_AS: limits.memory_mb * 2**20,
            resource.RLIMIT_CPU: cpu,
            resource.RLIMIT_FSIZE: FILE_BYTES,
        }
        for kind, most in wanted.items():
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))

    home = {"HOME": os.getcwd(), "TMPDIR": os.getcwd()}
    for last in (False, True):
        try:
            return subprocess.Popen(
                [sys.executable, "-I", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_ENVIRONMENT | home,
                preexec_fn=confine,
                start_new_session=True,
                bufsize=0,
            )
        except (OSError, subprocess.SubprocessError):
            if last:
                raise
            time.sleep(0.05)
    raise AssertionError


class Functions:
    """The functions of a loaded program, to be called by tests. Raises ProgramFailed where the
    program cannot be loaded.
    """

    def __init__(self, program: Program, text: str):
        self._program = program
        said = program.ask({"load": text})
        names = said.get("names")
        if not isinstance(names, list):
            raise ProgramFailed(f"it raised {said.get('raised')}: {said.get('text')}"[:500])
        self.names = [name for name in names if isinstance(name, str) and name.isidentifier()]

    def namespace(self) -> dict[str, Any]:
        """Name -> a function that calls the program's; lists, sets and dicts that it is given
        become what the program made of them.
        """
        return {name: self._proxy(name) for name in self.names}

    def _proxy(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            said = self._program.ask({"call": [name, encode(list(args)), encode(kwargs)]})
            if "raised" in said:
                raise _exception(said)
            try:
                value, after = decode(said["value"]), decode(said["args"])
            except (KeyError, ValueError, TypeError, RecursionError) as error:
                raise ProgramFailed("it wrote what is no answer") from error
            for before, now in zip(args, after if isinstance(after, list) else ()):
                _become(before, now)
            return value

        return call


def _become(before: Any, now: Any) -> None:
    if type(before) is not type(now):
        return
    if isinstance(before, list):
        before[:] = now
    elif isinstance(before, dict | set):
        before.clear()
        before.update(now)


def _exception(said: Mapping[str, Any]) -> Exception:
    found = getattr(builtins, str(said["raised"]), None)
    text = str(said.get("text", ""))
    if isinstance(found, type) and issubclass(found, Exception):
        with contextlib.suppress(TypeError):
            return found(text)
    return RuntimeError(f"{said['raised']}: {text}")


def passed_functions(text: str, tests: Sequence[str], setup: str, limits: Limits) -> Iterator[bool]:
    """Whether each test passes: Python text that calls the program's functions by their names and
    raises where it fails. `setup` runs before each.

    What is left when the program hangs, ends or crashes fails.
    """
    try:
        with Program([CHILD], limits) as program:
            functions = Functions(program, text)
            for test in tests:
                yield _passes(test, setup, functions)
    except ProgramFailed:
        return


def can_run() -> bool:
    """Whether a right program passes its test in this place: a fault of the place would else be the
    zero of every response.
    """
    found = passed_functions("def f(): return 1", ["assert f() == 1"], "", Limits(seconds=30.0))
    return list(found) == [True]


def _passes(test: str, setup: str, functions: Functions) -> bool:
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        exec(compile(setup, "setup", "exec"), names)
        names |= functions.namespace()
        exec(compile(test, "test", "exec"), names)
    except ProgramFailed:
        raise
    except Exception:
        return False
    return True


def passed_outputs(
    text: str, inputs: Sequence[str], outputs: Sequence[str], limits: Limits
) -> Iterator[bool]:
    """Whether the program, run anew for each input, writes each output; white space at the end of
    lines and of the output does not count.
    """
    end = time.monotonic() + limits.seconds
    Path("program.py").write_text(text, encoding="utf-8", errors="replace")
    for given, wanted in zip(inputs, outputs, strict=True):
        left = limits._replace(seconds=end - time.monotonic())
        if left.seconds <= 0:
            return
        try:
            with Program(["program.py"], left) as program:
                yield _lines(program.output(given)) == _lines(wanted)
        except ProgramFailed:
            yield False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
