"""Start of Python child processes, which import the same files as their parent, and nothing from
the current folder.

The process that `Child` starts is a guardian (`run`). It forks a child that does the work, in
separate namespaces if the machine supports them. It then waits until the child ends or the lifeline
closes. The lifeline is a pipe that closes when the process that started the worker ends, for any
reason. The guardian then kills all descendants, removes the folder, and exits like the child.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from compass_jax.devices.processes import guards
from compass_jax.devices.processes.channel import Channel
from compass_jax.devices.processes.folders import remove_folder

ROOT = str(Path(__file__).resolve().parents[3])
KILL_LIMIT_S = 10.0  # timeout of killing the descendants
END_LIMIT_S = 15.0  # timeout of a child's exit, with its descendants
# variables for a sandboxed process; others may hold secrets
_PASSED = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_PASSED_PREFIXES = ("LC_", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING", "COVERAGE_")


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module, without the current folder in its import path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def import_path() -> str:
    """Returns the PYTHONPATH of a child: the standard library, this package's folder, then this
    process's import path in its order.

    The standard library must be listed, because PYTHONPATH precedes it otherwise: a `random.py` in
    the folder of a reward function would hide Python's.
    """
    library = Path(sysconfig.get_path("stdlib"))
    standard = [str(folder) for folder in (library, library / "lib-dynload") if folder.is_dir()]
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    return os.pathsep.join(dict.fromkeys([*standard, ROOT, *path]))


def environment(passes_all: bool) -> dict[str, str]:
    """Returns a worker's environment: all variables, or those known to hold no secret."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if passes_all or name in _PASSED or name.startswith(_PASSED_PREFIXES)
    }
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**variables, "PYTHONPATH": import_path(), **threads}


class Child:
    """A module that runs in another process and calls `run`, with a channel to it. The process ends
    with this one, even if this one is killed.
    """

    def __init__(self, module: str, environment: dict[str, str]):
        parent_end, child_end = multiprocessing.Pipe()
        lifeline, writer = os.pipe()
        self._lifeline = os.fdopen(writer, "wb", 0)
        passed = (child_end.fileno(), lifeline)
        # not multiprocessing, whose children import the main module and with it jax
        self.process = subprocess.Popen(
            module_command(module, *map(str, passed)),
            pass_fds=passed,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        child_end.close()
        os.close(lifeline)
        self.channel = Channel(parent_end)

    def hang_up(self) -> None:
        """Makes the process end its descendants and itself. Thread-safe."""
        self._lifeline.close()

    def kill(self) -> int:
        """Ends the process with its descendants and returns its exit code."""
        self.hang_up()
        try:
            code = self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.channel.close()
        return code


def run(serve: Callable[[Channel, Any, str], None]) -> None:
    """Runs `serve(channel, setup, folder)` in a child of this process, as `python -m MODULE CHANNEL
    LIFELINE`.

    The first value on the channel is `setup`, a mapping whose "guards" are those of the child.
    `folder` is empty. Both processes end when the channel is closed. SIGINT and SIGTERM are
    ignored: the process that started the worker handles them.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    descriptor, lifeline = map(int, sys.argv[1:3])
    channel = Channel(Connection(descriptor))
    # the process at the other end has ended, or no longer needs this one
    with contextlib.suppress(EOFError, ConnectionError):
        _separate(serve, channel, lifeline)


def _separate(serve: Callable[[Channel, Any, str], None], channel: Channel, lifeline: int) -> None:
    setup = channel.receive()
    folder = tempfile.mkdtemp(prefix="compass-check-")
    guards.adopt_orphans()
    missing = guards.separate(setup["guards"])
    child = os.fork()
    if child:
        channel.close()
        _wait(child, lifeline, folder)
    os.close(lifeline)
    guards.die_with_parent()
    if missing:
        channel.send(["failed", f"guards that were there are missing: {missing}"])
    else:
        serve(channel, setup, folder)


def _wait(child: int, lifeline: int, folder: str) -> NoReturn:
    descriptor = os.pidfd_open(child)
    poll = select.poll()
    for one in (descriptor, lifeline):  # the lifeline becomes readable when it is closed
        poll.register(one, select.POLLIN)
    if descriptor not in dict(poll.poll()):
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    guards.kill_descendants(time.monotonic() + KILL_LIMIT_S)
    remove_folder(folder)
    # Ends by the same signal as the child; `run` has set SIGINT and SIGTERM to be ignored.
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
