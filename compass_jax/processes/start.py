"""The start of Python processes: a child imports the same files as its parent, and nothing from the
current folder.
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
END_LIMIT_S = 15.0  # for a child to end its descendants and itself
# variables that Python and a verifier need; a sandboxed process gets no other, which may be secret
_PASSED = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_PASSED_PREFIXES = ("LC_", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING", "COVERAGE_")


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs `python -m module`; -P keeps the current folder off its import
    path.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def import_path() -> str:
    """Returns the PYTHONPATH of a child: the standard library, the folder of this package, then
    the import path of this process in its order.

    The standard library has to be named: everything in PYTHONPATH precedes it otherwise, and a
    `random.py` beside a reward function would hide Python's.
    """
    library = Path(sysconfig.get_path("stdlib"))
    standard = [str(folder) for folder in (library, library / "lib-dynload") if folder.is_dir()]
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    return os.pathsep.join(dict.fromkeys([*standard, ROOT, *path]))


def environment(passes_all: bool) -> dict[str, str]:
    """Returns the environment of a worker, with all variables of this process or with those that
    are known to hold no secret.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if passes_all or name in _PASSED or name.startswith(_PASSED_PREFIXES)
    }
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**variables, "PYTHONPATH": import_path(), **threads}


class Child:
    """A module that runs in another process behind a guardian (guardian.py), and a channel to it.

    It ends with this process, also where this process is killed.

    Args:
        module: it calls `guardian.run`.
        environment: of the process.
    """

    def __init__(self, module: str, environment: dict[str, str]):
        near, far = socket.socketpair()
        lifeline, writer = os.pipe()
        self._lifeline = os.fdopen(writer, "wb", 0)
        passed = (far.fileno(), lifeline)
        # not multiprocessing: its children import the program's main module, and with it jax
        self.process = subprocess.Popen(
            module_command(module, *map(str, passed)),
            pass_fds=passed,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        far.close()
        os.close(lifeline)
        self.channel = Channel(os.dup(near.fileno()), near.detach())

    def hang_up(self) -> None:
        """Lets the process end its descendants and itself. Any thread may call it."""
        self._lifeline.close()

    def kill(self) -> int:
        """Ends the process with its descendants, and returns its exit code."""
        self.hang_up()
        try:
            code = self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.channel.close()
        return code
