"""Several processes, one program: each runs the same Python on the same host state, and arrays lie
over the devices of all of them.

So a process may decide only by what all know: what `sharding.fetch` reads from the devices, and
what is exchanged here (scores, requests to stop). A process that is lost takes the others with it:
none can compute alone, and the same command goes on from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from compass_jax.config.errors import check
from compass_jax.errors import CompassError

VARIABLES = ("COMPASS_COORDINATOR", "COMPASS_PROCESSES", "COMPASS_PROCESS_ID")
# exit status where another process was lost (EX_TEMPFAIL: the same command goes on); jax's own end
# of a process is an abort, 134
LOST = 75
# a process that is silent for so long is lost; jax's own 100 s would hold a pod that long
HEARTBEAT_S = 10
_SIMULATED = "xla_force_host_platform_device_count"
# Of XLA's pool where devices are simulated; it has as many as devices by itself. A collective holds
# one for each device until all have come, and so does a launch onto a device with 32 programs ahead
# of it: a device that is late then finds none, and all wait for ever (seen on two cores).
_THREADS = 64
_SMALLEST = 1024  # bytes of an exchange: sizes are powers of two, so that few programs are compiled


class DistributedError(CompassError, RuntimeError):
    """The processes did not find each other; the message names the address and what to check."""


def initialize() -> bool:
    """Joins the processes that the environment names; whether there are several. Comes before
    anything that uses a device, one process or many.

    COMPASS_COORDINATOR (host:port of process 0), COMPASS_PROCESSES and COMPASS_PROCESS_ID: all or
    none. COMPASS_DISTRIBUTED=auto alone: a TPU pod or GKE, where jax finds the others itself.
    Raises ConfigError for variables that cannot be used, DistributedError where the others are not
    met.
    """
    settings: Any = jax.config
    options, on_cpu = _options(), "cpu" in (settings.jax_platforms or "cpu")
    if on_cpu and (
        options is not None
        or _SIMULATED in os.environ.get("XLA_FLAGS", "")
        or (settings.jax_num_cpu_devices or 0) > 1
    ):
        os.environ.setdefault("PJRT_NPROC", str(max(_THREADS, os.cpu_count() or 1)))
    if options is None:
        return False
    # it would take SIGTERM, which StopSignal answers
    jax.config.update("jax_enable_preemption_service", False)
    if on_cpu:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # gloo pairs up collectives by their order: one program after the other
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        jax.distributed.initialize(**options, heartbeat_timeout_seconds=HEARTBEAT_S)
    except jax.errors.JaxRuntimeError as error:
        where = options.get("coordinator_address", "the coordinator that jax found")
        raise DistributedError(
            f"the processes did not meet at {where}: {_first_line(error)}; start the same command"
            " in every process, each with its own COMPASS_PROCESS_ID, and check that process 0 can"
            " be reached there"
        ) from error
    return True


def refuse(what: str) -> None:
    """ConfigError where the environment names several processes, and `what` works in one."""
    check(
        _options() is None,
        f"{what} runs in one process: unset {', '.join(VARIABLES)} and COMPASS_DISTRIBUTED, and"
        " start it once",
    )


def _options() -> dict[str, Any] | None:
    """What jax.distributed.initialize is to be told; None: this process is alone."""
    given, auto = (
        {name: os.environ.get(name, "") for name in VARIABLES},
        os.environ.get("COMPASS_DISTRIBUTED", ""),
    )
    missing = [name for name, value in given.items() if not value]
    if len(missing) == len(given):
        check(
            auto in ("", "auto"),
            f"COMPASS_DISTRIBUTED = {auto!r}: only 'auto' is known, of TPU pods and GKE; else set"
            f" {', '.join(VARIABLES)}",
        )
        return {} if auto else None
    there = ", ".join(name for name in given if given[name])
    check(
        not missing,
        f"{', '.join(missing)} not set, but {there}: set all of {', '.join(VARIABLES)}, or none",
    )
    address, count, number = given.values()
    host, _, port = address.rpartition(":")
    check(
        bool(host) and port.isdigit(),
        f"COMPASS_COORDINATOR = {address!r}: must be host:port of process 0",
    )
    check(
        count.isdigit() and int(count) >= 1,
        f"COMPASS_PROCESSES = {count!r}: must be a number of at least 1",
    )
    known = number.isdigit() and int(number) < int(count)
    check(
        known,
        f"COMPASS_PROCESS_ID = {number!r}: must be in 0..{int(count) - 1} (COMPASS_PROCESSES ="
        f" {count})",
    )
    if int(count) == 1:
        return None
    options = {
        "coordinator_address": address,
        "num_processes": int(count),
        "process_id": int(number),
    }
    return (
        {**options, "coordinator_bind_address": address}
        if host in ("127.0.0.1", "localhost")
        else options
    )


@contextlib.contextmanager
def processes() -> Iterator[None]:
    """Around a whole run: `initialize` before it; behind it every process waits for the others.

    In a process of several, an error is told on stderr and ends the process at once: the
    interpreter's own end would wait for processes that wait for this one. One that ends in any
    other way (`kill -9`, jax's abort when another is lost) leaves last words.
    """
    if not initialize() or jax.process_count() == 1:
        yield
        return
    name = (
        f"process {jax.process_index()} of {jax.process_count()} (pid {os.getpid()} on"
        f" {socket.gethostname()})"
    )
    with _LastWords(name) as words:
        try:
            yield
            jax.distributed.shutdown()
        except BaseException as error:  # SystemExit of a second SIGTERM, KeyboardInterrupt
            code = _told(name, error)
            # its message says all; it may be the same in every process
            if isinstance(error, CompassError):
                words.withdraw()
            os._exit(code)


class _LastWords:
    """A shell that waits for this process, and speaks if it ends without leaving the context."""

    def __init__(self, name: str):
        text = (
            f"compass: {name} has ended before the run did. Where another process was lost, the"
            f" lines above say which. Those that are left end within {2 * HEARTBEAT_S} s; the same"
            " command, in every process, goes on from the last checkpoint."
        )
        script = 'read -r word; [ "$word" = done ] || printf "%s\\n" "$0" >&2'
        # a session of its own: what ends the process's group must not end it
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", script, text], stdin=subprocess.PIPE, start_new_session=True
        )

    def __enter__(self) -> _LastWords:
        return self

    def __exit__(self, *_: object) -> None:
        self.withdraw()

    def withdraw(self) -> None:
        """Nothing will be said."""
        self._shell.communicate(b"done\n")


def _told(name: str, error: BaseException) -> int:
    """Says what ended this process; its exit code."""
    if isinstance(error, SystemExit | KeyboardInterrupt):
        code = error.code if isinstance(error, SystemExit) else 130
        code = code if isinstance(code, int) else 1
        print(f"compass: {name} was ended from outside", file=sys.stderr, flush=True)
    elif isinstance(error, jax.errors.JaxRuntimeError):
        code = LOST
        traceback.print_exception(error)
        print(
            f"compass: {name}: a computation failed, as it does when another process is lost:"
            f" {_first_line(error)}",
            file=sys.stderr,
            flush=True,
        )
        # jax's service names the process that was lost, and ends this one
        time.sleep(HEARTBEAT_S + 2)
    elif isinstance(error, CompassError):
        code = error.exit_status
        print(f"compass: {name}: {error}", file=sys.stderr, flush=True)
    else:
        code = 1
        traceback.print_exception(error)
    sys.stdout.flush()
    return code


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]


def is_main_process() -> bool:
    """Whether this process writes: the log, the configuration, checkpoints' metadata, the
    console.
    """
    return jax.process_index() == 0


def exchange(payload: bytes) -> list[bytes]:
    """Every process's payload, in their order. All call it at the same place."""
    if jax.process_count() == 1:
        return [payload]
    sizes = multihost_utils.process_allgather(np.array(len(payload), np.int32))
    room = _SMALLEST
    while room < sizes.max():
        room *= 2
    padded = np.zeros(room, np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    found = multihost_utils.process_allgather(padded)
    return [row[:n].tobytes() for row, n in zip(found, sizes, strict=True)]


def anyone(flag: bool) -> bool:
    """Whether `flag` holds in any process. All call it at the same place."""
    return (
        flag
        if jax.process_count() == 1
        else bool(multihost_utils.process_allgather(np.array(flag)).any())
    )


def same(values: dict[str, Any], remedy: str) -> None:
    """Raises ConfigError, in every process, for the first of these values (JSON-able, by name) that
    is not that of process 0.
    """
    ours, *others = (json.loads(text) for text in exchange(json.dumps(values).encode()))
    for number, theirs in enumerate(others, 1):
        name = next(
            (name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), None
        )
        check(
            name is None,
            f"{name} is {ours.get(name)!r} in process 0 and {theirs.get(name)!r} in process"
            f" {number}: {remedy}",
        )
