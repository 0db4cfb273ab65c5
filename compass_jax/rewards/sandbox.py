"""One function in a child of its own: a warm process forks, the child works, a value comes back.

    zone = enter(guards, folder, readable)         once, after the imports
    outcome = zone.run(function, seconds)          for each call

The child has no descriptor but /dev/null, a temporary folder of its own, limits, and, where there
are process namespaces, sees nobody. Its value comes through a page of memory made for this call:
it is read when every process of the call is dead, and is data of one fixed form.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import select
import shutil
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

from compass_jax.errors import CompassError
from compass_jax.verifiers import guards

PAGE_BYTES = 2**16
DETAIL_CHARS = 2000
END_LIMIT_S = 10.0  # to kill what a call left, and to empty its folder
_LENGTH = struct.Struct("=I")


class Outcome(NamedTuple):
    """How a call went: its value where `outcome` is "ok", else why there is none."""

    value: Any
    outcome: str  # "ok", "error", "timeout" or "crash"
    detail: str = ""


class SandboxError(CompassError, RuntimeError):
    """A process that can run no more calls: what the last one left could not be removed."""


class Zone:
    """A confined process that runs functions in children. Made by `enter`."""

    def __init__(self, active: frozenset[str], folder: str, namespace: int, null: int):
        self._active = active
        self._folder = folder
        self._namespace = namespace  # a descriptor of the own process namespace, or -1
        self._null = null
        self._count = 0

    def run(self, function: Callable[[], Any], seconds: float) -> Outcome:
        """What `function` returned, as JSON keeps it, or how it failed.

        Args:
            function: is called without arguments in a child of this process.
            seconds: of wall clock; a child that takes longer is killed with its descendants.

        Raises SandboxError where something of the call outlived it.
        """
        self._count += 1
        folder = os.path.join(self._folder, str(self._count))
        os.mkdir(folder)
        with mmap.mmap(-1, PAGE_BYTES) as page:
            if self._namespace >= 0:
                guards.new_process_namespace()
            child = os.fork()
            if child == 0:
                self._work(function, page, folder, seconds)
            late = not _ended(child, seconds)
            if late:
                os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            self._end(folder)
            if late:
                return Outcome(None, "timeout", f"no answer after {seconds} s")
            if code != 0:
                return Outcome(None, "crash", f"the check ended with code {code}")
            return _read(page)

    def _end(self, folder: str) -> None:
        """Nothing of the call is left: no process, no file."""
        if self._namespace >= 0:
            guards.rejoin(self._namespace)
        elif not guards.kill_descendants(time.monotonic() + END_LIMIT_S):
            raise SandboxError("processes of a check could not be killed")
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        if os.listdir(self._folder):
            try:
                for name in os.listdir(self._folder):
                    _remove(os.path.join(self._folder, name))
            except (OSError, RecursionError) as error:
                raise SandboxError(f"files of a check could not be removed: {error}") from error

    def _work(self, function: Callable, page: mmap.mmap, folder: str, seconds: float) -> NoReturn:
        """The child: takes away what it must not have, calls, writes the value, ends."""
        code = 70
        try:
            own = os.getpid()
            self._strip(folder, seconds)
            try:
                said = json.dumps([True, function()])
            except BaseException:  # a check may even call exit()
                said = json.dumps([False, traceback.format_exc()[-DETAIL_CHARS:]])
            if os.getpid() == own:  # what a check forked may come out of it as well
                blob = said.encode()
                if len(blob) > PAGE_BYTES - _LENGTH.size:
                    blob = json.dumps([False, f"an answer of {len(blob):,} bytes"]).encode()
                page[: _LENGTH.size + len(blob)] = _LENGTH.pack(len(blob)) + blob
                code = 0
        finally:
            os._exit(code)

    def _strip(self, folder: str, seconds: float) -> None:
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
) -> Zone:
    """The zone that this process is in from here on.

    Args:
        active: guards, each of which must work; user and process namespace are there already.
        folder: may be written to, and nothing else, where the guards for that are active.
        readable: may be read, beside the system's libraries.
        of_programs: may be read by programs, and nothing else.

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
    return Zone(active, folder, namespace, null)


def _ended(child: int, seconds: float) -> bool:
    """Whether the child ends within `seconds`."""
    descriptor = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)


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


def _read(page: mmap.mmap) -> Outcome:
    """What a child wrote, or a crash where that is not of the form [true, value]."""
    (length,) = _LENGTH.unpack(page[: _LENGTH.size])
    try:
        if not 0 < length <= PAGE_BYTES - _LENGTH.size:
            raise ValueError
        good, value = json.loads(page[_LENGTH.size : _LENGTH.size + length])
        if good is True:
            return Outcome(value, "ok")
        if good is False and isinstance(value, str):
            return Outcome(None, "error", value[-DETAIL_CHARS:])
    except (ValueError, TypeError, RecursionError):
        pass
    return Outcome(None, "crash", "the check ended without an answer")
