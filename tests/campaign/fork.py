"""Commands in children of a warm process: what takes seconds to import is imported once.

`warm` imports, and checks that the process has one thread and no JAX backend, without which a
fork is not safe. `start` forks a child that runs `compass_jax.commands.cli.main` in its own
session with limits, and ends as an interpreter does: it waits for threads, then for what was
registered to run at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .words import NOT_TAKEN, Ended

PR_SET_PDEATHSIG = 1  # of Linux
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "COLUMNS": "200",
    "PYTHONHASHSEED": "0",
}


@dataclass(frozen=True)
class Limits:
    """Of one command: seconds, seconds of CPU, bytes of address space, bytes of one file (0:
    any).
    """

    seconds: float = 60.0
    cpu_s: int = 60
    memory: int = 6 * 2**30
    file_bytes: int = 0


@dataclass
class Child:
    """A command that runs, or has ended."""

    pid: int
    folder: Path
    limits: Limits
    began: float = field(default_factory=time.monotonic)
    status: int | None = None

    def poll(self) -> int | None:
        """Its status once it has ended; negative for a signal."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def send(self, number: int) -> None:
        """A signal to the command alone, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kills it and its session's group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.002)

    def wait(self) -> Ended:
        """How it ended; killed at its limit."""
        pause, timed_out = 0.002, False
        while self.poll() is None and not timed_out:
            time.sleep(pause)
            pause = min(0.05, 1.3 * pause)
            timed_out = time.monotonic() - self.began > self.limits.seconds
        self.end()
        seconds = time.monotonic() - self.began
        timed_out = timed_out or self.status == -signal.SIGXCPU
        outcome, file = NOT_TAKEN, self.folder / "outcome"
        if file.exists():
            outcome = json.loads(file.read_text())
        return Ended(self.status, self._said("out"), self._said("err"), timed_out, outcome, seconds)

    def _said(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")[-100_000:]


def prepare_environment(cache: Path) -> None:
    """Sets what must be set before JAX is imported."""
    os.environ.update(ENVIRONMENT)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    os.environ.pop("XLA_FLAGS", None)


def warm() -> None:
    """Imports what the commands import. AssertionError where a fork would not be safe
    afterwards.
    """
    import grain
    import jax
    import jinja2.ext
    import jinja2.sandbox
    import orbax.checkpoint
    import reasoning_gym
    import tensorboardX
    import tokenizers
    import tyro
    from jax._src import xla_bridge

    import compass_jax.commands.cli
    import compass_jax.commands.offline_filter
    import compass_jax.data.tokenizer
    import compass_jax.experience.evaluate
    import compass_jax.report
    import compass_jax.training.rl
    import compass_jax.training.sft
    import compass_jax.weights.convert

    assert not xla_bridge.backends_are_initialized(), (
        "a JAX backend runs: its threads would not be in a fork"
    )
    gc.collect()
    # what is there now is never touched by a child's collector, so that its pages stay shared
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork would have one of them alone"
    assert all(
        (grain, jax, jinja2, orbax, reasoning_gym, tensorboardX, tokenizers, tyro, compass_jax)
    )


Spy = Callable[[Callable[[Any], None]], None]


def start(
    argv: list[str],
    cwd: Path,
    said: Path,
    limits: Limits,
    spy: Spy | None = None,
    before: Callable[[], None] | None = None,
) -> Child:
    """Forks a child that runs `compass ARGV` in `cwd`; its output and outcome go to the folder
    `said`.

    spy: called first with `take`, which writes the outcome. before: called last before the command.
    """
    said.mkdir(parents=True, exist_ok=True)
    (said / "argv").write_text(json.dumps(argv))
    for name in ("out", "err", "outcome"):
        (said / name).unlink(missing_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return Child(pid, said, limits)
    status = 70
    try:
        _enter(cwd, said, limits)
        status = _command(argv, spy, said, before)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(status)


def leave(status: int) -> None:
    """Ends the process as an interpreter does: threads first, then what runs at exit."""
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        status = status or 1
    os._exit(status)


def _enter(cwd: Path, said: Path, limits: Limits) -> None:
    os.setsid()
    # A campaign that is killed leaves nothing that runs.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, "out", 0), (2, "err", 0)):
        path = name if number == 0 else said / name
        opened = os.open(path, flags or os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGXFSZ):
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.chdir(cwd)
    if limits.memory:
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits.file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, resource.RLIM_INFINITY))


def _command(
    argv: list[str], spy: Spy | None, said: Path, before: Callable[[], None] | None
) -> int:
    from compass_jax.commands.cli import main
    from compass_jax.runs.signals import Ending

    def take(outcome: Any) -> None:
        (said / "outcome").write_text(json.dumps(outcome))

    sys.argv = ["compass", *argv]
    try:
        if spy is not None:
            spy(take)
        if before is not None:
            before()
        with Ending("compass"):  # as __main__ does
            return main(argv)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
