"""Start of Python child processes. A child imports the same files as its parent, and nothing from
the current folder.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

from compass_jax.processes.channel import Channel

ROOT = str(Path(__file__).resolve().parents[2])
END_LIMIT_S = 15.0  # timeout of a child's exit, with its descendants
# variables for a sandboxed process; others may hold secrets
_PASSED = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_PASSED_PREFIXES = ("LC_", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING", "COVERAGE_")


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs `python -m module`. -P removes the current folder from its
    import path.
    """
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
    """Returns the environment of a worker: all variables of this process, or those known to hold no
    secret.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if passes_all or name in _PASSED or name.startswith(_PASSED_PREFIXES)
    }
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**variables, "PYTHONPATH": import_path(), **threads}


class Child:
    """A module that runs in another process behind a guardian (guardian.py), with a channel to it.

    The process ends with this one, even if this one is killed.

    Args:
        module: a module that calls `guardian.run`.
        environment: environment variables of the process.
    """

    def __init__(self, module: str, environment: dict[str, str]):
        parent_end, child_end = socket.socketpair()
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
        self.channel = Channel(os.dup(parent_end.fileno()), parent_end.detach())

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
