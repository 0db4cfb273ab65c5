"""A sandbox for functions: a process with all imports done forks a child for each call, and the
child returns a value.

    sandbox = Sandbox(guards, folder, readable)       once, after the imports
    result = sandbox.run(function, seconds)           for each call

The child has only /dev/null as descriptors, an empty folder and resource limits. With a process
namespace it sees no other process. Its value is read after all processes of the call are dead, and
must have one fixed form.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from compass_jax.base.aliases import Json
from compass_jax.base.errors import CompassError
from compass_jax.devices.processes import guards
from compass_jax.devices.processes.channel import ExitStatus, run_forked
from compass_jax.devices.processes.folders import empty_folder

ANSWER_BYTES = 2**16
DETAIL_CHARS = 2000
END_LIMIT_S = 10.0  # timeout of the cleanup after a call


class Result(NamedTuple):
    """The value of a call if `outcome` is "ok"; else the reason in `detail`."""

    value: Json
    outcome: str  # "ok", "error", "timeout" or "crash"
    detail: str = ""


class SandboxError(CompassError, RuntimeError):
    """The remains of a call could not be removed, so this process can run no further calls."""


class Sandbox:
    """This process, confined irreversibly, which runs functions in children.

    The arguments are those of `guards.confine`; the user and process namespaces are entered
    already. Raises OSError, naming the guard, if one of `active` is unavailable.
    """

    def __init__(
        self,
        active: Iterable[str],
        folder: str,
        readable: Iterable[str],
        of_programs: guards.ProgramFiles = guards.NO_PROGRAM,
    ):
        self._active, self._folder, self._count = frozenset(active), folder, 0
        self._namespace = -1  # descriptor of this process's namespace, if it has one
        if guards.PROCESSES in self._active:
            self._namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        else:
            guards.adopt_orphans()
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        if self._active:
            missing = guards.confine(self._active, folder, readable, of_programs)
            if missing:
                raise OSError(1, "; ".join(f"{name}: {why}" for name, why in missing.items()))
            os.environ["HOME"] = folder
        gc.collect()
        gc.freeze()  # a garbage collection in a child would copy every page

    def run(self, function: Callable[[], Any], seconds: float) -> Result:
        """Returns the value of `function`, called in a child, after a JSON round trip, or its
        failure. A child that exceeds `seconds` is killed with its descendants. Raises SandboxError
        if a process or file of the call could not be removed.
        """
        self._count += 1
        folder = os.path.join(self._folder, str(self._count))
        os.mkdir(folder)
        if self._namespace >= 0:
            guards.new_process_namespace()

        def work(page: mmap.mmap) -> None:
            self._strip(folder, seconds)
            _answer(function, page)

        end = run_forked(work, seconds)
        self._clean(folder)
        return _result(end, seconds)

    def _clean(self, folder: str) -> None:
        """Removes all processes and files of a call."""
        if self._namespace >= 0:
            # The end of the child, the namespace's first process, has killed the others in it.
            guards.rejoin(self._namespace)
        elif not guards.kill_descendants(time.monotonic() + END_LIMIT_S):
            raise SandboxError("processes of a check could not be killed")
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        try:
            empty_folder(self._folder)
        except OSError as error:
            raise SandboxError(f"files of a check could not be removed: {error}") from error

    def _strip(self, folder: str, seconds: float) -> None:
        """Drops descriptors and privileges of the child."""
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


def _answer(function: Callable[[], Any], page: mmap.mmap) -> None:
    """Writes [true, value] or [false, traceback] of a call."""
    process = os.getpid()
    try:
        answer = json.dumps([True, function()]).encode()
        if len(answer) > ANSWER_BYTES:
            raise ValueError(f"an answer of {len(answer):,} bytes")
    except BaseException:  # the function may even call exit()
        answer = json.dumps([False, traceback.format_exc()[-DETAIL_CHARS:]]).encode()
    if os.getpid() == process:  # a process forked by the function may return here, too
        page.write(answer)


def _result(end: ExitStatus, seconds: float) -> Result:
    """Returns the result of a child that ended. Its output is untrusted."""
    if end.late:
        return Result(None, "timeout", f"no answer after {seconds} s")
    if end.code != 0:
        return Result(None, "crash", f"the check ended with code {end.code}")
    with contextlib.suppress(ValueError, RecursionError):
        match json.loads(end.output):
            case [True, value]:
                return Result(value, "ok")
            case [False, str(trace)]:
                return Result(None, "error", trace[-DETAIL_CHARS:])
    return Result(None, "crash", "the check ended without an answer")
