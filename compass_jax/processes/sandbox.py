"""A function in a sandbox: a warm process forks, the child works, a value comes back.

    sandbox = enter(guards, folder, readable)         once, after the imports
    result = sandbox.run(function, seconds)           for each call

The child has no descriptor but /dev/null, an empty folder, limits, and, with a process namespace,
sees no other process. Its value is read when every process of the call is dead, and is data of one
fixed form.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from compass_jax.errors import CompassError
from compass_jax.processes import guards
from compass_jax.processes.forked import Ended, run_forked

ANSWER_BYTES = 2**16
DETAIL_CHARS = 2000
END_LIMIT_S = 10.0  # for the processes and files that a call leaves


class Result(NamedTuple):
    """The value of a call where `outcome` is "ok"; else the reason in `detail`."""

    value: Any
    outcome: str  # "ok", "error", "timeout" or "crash"
    detail: str = ""


class SandboxError(CompassError, RuntimeError):
    """The remains of a call could not be removed: this process can run no more of them."""


class Sandbox:
    """A confined process that runs functions in children. Made by `enter`."""

    def __init__(self, active: frozenset[str], folder: str, namespace: int, null: int):
        self._active = active
        self._folder = folder
        self._namespace = namespace  # a descriptor of this process's namespace, or -1
        self._null = null
        self._count = 0

    def run(self, function: Callable[[], Any], seconds: float) -> Result:
        """Returns the value of `function`, as JSON keeps it, or how it failed.

        Args:
            function: is called without arguments in a child of this process.
            seconds: of wall clock; a child that takes longer is killed with its descendants.

        Raises SandboxError where something of the call outlived it.
        """
        self._count += 1
        folder = os.path.join(self._folder, str(self._count))
        os.mkdir(folder)
        if self._namespace >= 0:
            guards.new_process_namespace()

        def work(page: mmap.mmap) -> None:
            self._strip(folder, seconds)
            _answer(function, page)

        ended = run_forked(work, seconds)
        self._clean(folder)
        return _result(ended, seconds)

    def _clean(self, folder: str) -> None:
        """Removes all processes and files of a call."""
        if self._namespace >= 0:
            guards.rejoin(self._namespace)
        elif not guards.kill_descendants(time.monotonic() + END_LIMIT_S):
            raise SandboxError("processes of a check could not be killed")
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        try:
            for name in os.listdir(self._folder):
                _remove(os.path.join(self._folder, name))
        except (OSError, RecursionError) as error:
            raise SandboxError(f"files of a check could not be removed: {error}") from error

    def _strip(self, folder: str, seconds: float) -> None:
        """Removes descriptors and rights from the child."""
        os.setsid()
        for number in (0, 1, 2):
            os.dup2(self._null, number)
        guards.close_descriptors()
        os.chdir(folder)
        os.environ["TMPDIR"] = folder
        tempfile.tempdir = folder
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        guards.limit(seconds, guards.USER in self._active)
        if self._namespace < 0:
            guards.die_with_parent()
            if guards.SECCOMP in self._active:
                guards.signal_nobody_else()
        if self._active:
            guards.drop_capabilities()


def enter(
    active: Iterable[str],
    folder: str,
    readable: Iterable[str],
    of_programs: guards.ProgramFiles = guards.NO_PROGRAM,
) -> Sandbox:
    """Confines this process for good, and returns the sandbox that it is.

    Args:
        active: guards, each of which must work; user and process namespace are there already.
        folder: may be written to, and no other where the guards for that are active.
        readable: may be read, beside the system's libraries.
        of_programs: the files that programs may read.

    Raises OSError naming the guard that cannot be had.
    """
    active = frozenset(active)
    namespace = -1
    if guards.PROCESSES in active:
        namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    else:
        guards.adopt_orphans()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if active:
        missing = guards.confine(active, folder, readable, of_programs)
        if missing:
            raise OSError(1, "; ".join(f"{name}: {why}" for name, why in missing.items()))
        os.environ["HOME"] = folder
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    return Sandbox(active, folder, namespace, null)


def _answer(function: Callable[[], Any], page: mmap.mmap) -> None:
    """Writes [true, value] or [false, traceback] of a call."""
    process = os.getpid()
    try:
        answer = json.dumps([True, function()]).encode()
        if len(answer) > ANSWER_BYTES:
            raise ValueError(f"an answer of {len(answer):,} bytes")
    except BaseException:  # a check may even call exit()
        answer = json.dumps([False, traceback.format_exc()[-DETAIL_CHARS:]]).encode()
    if os.getpid() == process:  # a child that a check forked may return as well
        page.write(answer)


def _result(ended: Ended, seconds: float) -> Result:
    """Returns the result of a child that ended. Its text is not trusted."""
    if ended.late:
        return Result(None, "timeout", f"no answer after {seconds} s")
    if ended.code != 0:
        return Result(None, "crash", f"the check ended with code {ended.code}")
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        good, value = json.loads(ended.output)
        if good is True:
            return Result(value, "ok")
        if good is False and isinstance(value, str):
            return Result(None, "error", value[-DETAIL_CHARS:])
    return Result(None, "crash", "the check ended without an answer")


def _remove(path: str) -> None:
    if not os.path.isdir(path) or os.path.islink(path):
        os.unlink(path)
        return
    try:
        shutil.rmtree(path)
    except PermissionError:  # folders that were closed: each is opened before it is listed
        os.chmod(path, 0o700)
        for here, folders, _ in os.walk(path):
            for name in folders:
                if not os.path.islink(inner := os.path.join(here, name)):
                    os.chmod(inner, 0o700)
        shutil.rmtree(path)
