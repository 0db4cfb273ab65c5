"""Coordination of a program that runs as several processes (multi-controller JAX).

Each process runs the same Python program on the same host state, and arrays are sharded over the
devices of all processes. A process may therefore branch only on values that all processes know:
values that `sharding.fetch` reads from the devices, and values gathered with the functions below,
such as scores and stop requests. When a process is lost, the others end too. The same command then
resumes the run from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from compass_jax.base.errors import CompassError
from compass_jax.config.errors import check

SHARED_FOLDER = "a run directory must be on a file system that all processes share"
VARIABLES = ("COMPASS_COORDINATOR", "COMPASS_PROCESSES", "COMPASS_PROCESS_ID")
# Exit status after another process was lost (EX_TEMPFAIL: the same command resumes the run). When
# jax itself ends a process, the status is that of an abort, 134.
LOST = 75
# Seconds without a heartbeat after which a process counts as lost: on a pod, where a host may stall
# for a while, and elsewhere. jax's default of 100 s would keep a pod idle for that long.
POD_HEARTBEAT_S, HEARTBEAT_S = 60, 10
_SIMULATED = "xla_force_host_platform_device_count"
# Threads of XLA's pool when devices are simulated. By default the pool has one thread per device.
# A collective holds one thread per device until all devices arrive, and so does a launch onto a
# device with 32 queued programs. A late device may then find no free thread: a deadlock (seen on
# two cores).
_THREADS = 64
_SMALLEST = 1024  # bytes of a gather; sizes are powers of two, so that few programs are compiled


class DistributedError(CompassError, RuntimeError):
    """The processes could not connect, in which case the message names the address and what to
    check; or another process failed, with this message.
    """


def initialize() -> bool:
    """Connects this process with the others that the environment variables describe.

    Call it before anything that uses a device, with one process or many. Set COMPASS_COORDINATOR
    (host:port of process 0), COMPASS_PROCESSES and COMPASS_PROCESS_ID together, or none of them. On
    a TPU pod or GKE, set only COMPASS_DISTRIBUTED=auto; jax then finds the other processes.

    Returns whether several processes run. Raises ConfigError for invalid variables and
    DistributedError when the processes cannot connect.
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
    # this service would handle SIGTERM, which RunState handles
    jax.config.update("jax_enable_preemption_service", False)
    if on_cpu:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # gloo matches collectives by their order, so programs must run one after the other
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        jax.distributed.initialize(**options, heartbeat_timeout_seconds=heartbeat_s())
    except jax.errors.JaxRuntimeError as error:
        where = options.get("coordinator_address", "the coordinator that jax found")
        raise DistributedError(
            f"the processes did not meet at {where}: {_first_line(error)}; start the same command"
            " in every process, each with its own COMPASS_PROCESS_ID, and check that process 0 can"
            " be reached there"
        ) from error
    return True


def require_single_process(what: str) -> None:
    """Raises ConfigError, naming `what`, if the environment describes several processes."""
    check(
        _options() is None,
        f"{what} runs in one process: unset {', '.join(VARIABLES)} and COMPASS_DISTRIBUTED, and"
        " start it once",
    )


def heartbeat_s() -> int:
    """Returns the seconds without a heartbeat after which a process counts as lost."""
    return HEARTBEAT_S if os.environ.get(VARIABLES[0]) else POD_HEARTBEAT_S


def _options() -> dict[str, Any] | None:
    """Returns the arguments of jax.distributed.initialize, or None for a single process."""
    variables = {name: os.environ.get(name, "") for name in VARIABLES}
    auto = os.environ.get("COMPASS_DISTRIBUTED", "")
    missing = [name for name, value in variables.items() if not value]
    if len(missing) == len(variables):
        check(
            auto in ("", "auto"),
            f"COMPASS_DISTRIBUTED = {auto!r}: only 'auto' is known, of TPU pods and GKE; else set"
            f" {', '.join(VARIABLES)}",
        )
        return {} if auto else None
    present = ", ".join(name for name in variables if variables[name])
    check(
        not missing,
        f"{', '.join(missing)} not set, but {present}: set all of {', '.join(VARIABLES)}, or none",
    )
    address, count, number = variables.values()
    host, _, port = address.rpartition(":")
    check(
        bool(host) and port.isdigit(),
        f"COMPASS_COORDINATOR = {address!r}: must be host:port of process 0",
    )
    check(
        count.isdigit() and int(count) >= 1,
        f"COMPASS_PROCESSES = {count!r}: must be a number of at least 1",
    )
    check(
        number.isdigit() and int(number) < int(count),
        f"COMPASS_PROCESS_ID = {number!r}: must be in 0..{int(count) - 1} (COMPASS_PROCESSES ="
        f" {count})",
    )
    if int(count) == 1:
        return None
    options = {"coordinator_address": address, "num_processes": int(count)}
    if host in ("127.0.0.1", "localhost"):
        # By default the service listens on every interface of the host.
        options["coordinator_bind_address"] = address
    return {**options, "process_id": int(number)}


@contextlib.contextmanager
def processes() -> Iterator[None]:
    """Runs a block as one of the run's processes: calls `initialize` before it, and waits for the
    other processes after it.

    With several processes, an error is printed to stderr and ends the process at once, because the
    interpreter's normal exit would wait for processes that wait for this one.
    """
    if not initialize() or jax.process_count() == 1:
        yield
        return
    name = (
        f"process {jax.process_index()} of {jax.process_count()} (pid {os.getpid()} on"
        f" {socket.gethostname()})"
    )
    try:
        yield
        jax.distributed.shutdown()
    except BaseException as error:  # SystemExit of a second SIGTERM, KeyboardInterrupt
        os._exit(_report_error(name, error))


def _report_error(name: str, error: BaseException) -> int:
    """Prints the error that ends this process and returns the exit status."""
    if isinstance(error, SystemExit | KeyboardInterrupt):
        code = error.code if isinstance(error, SystemExit) else 130
        code = code if isinstance(code, int) else 1
        print(f"compass: {name} was ended from outside", file=sys.stderr, flush=True)
    elif isinstance(error, jax.errors.JaxRuntimeError):
        code = LOST
        traceback.print_exception(error)
        print(
            f"compass: {name}: a computation failed, as it does when another process is lost:"
            f" {_first_line(error)}; start the same command in every process to go on from the last"
            " checkpoint",
            file=sys.stderr,
            flush=True,
        )
        # meanwhile jax's service names the lost process and ends this one
        time.sleep(heartbeat_s() + 2)
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


def process_index_and_count() -> tuple[int, int]:
    """Returns the index of this process and the number of processes: 0 and 1 before `initialize`
    joins several and after `processes` ends. A single process asks no backend, which would take
    the devices from another program.
    """
    if not jax.distributed.is_initialized():
        return 0, 1
    return jax.process_index(), jax.process_count()


def is_main_process() -> bool:
    """Returns whether this process writes the files and the console output."""
    return process_index_and_count()[0] == 0


def all_gather_bytes(payload: bytes) -> list[bytes]:
    """Returns all processes' payloads. Every process must call it at the same place."""
    if process_index_and_count()[1] == 1:
        return [payload]
    # The gathered arrays must have one shape in all processes, so the sizes are gathered first.
    sizes = multihost_utils.process_allgather(np.array(len(payload), np.int32))
    capacity = _SMALLEST
    while capacity < sizes.max():
        capacity *= 2
    padded = np.zeros(capacity, np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:n].tobytes() for row, n in zip(rows, sizes, strict=True)]


def in_main_process(do: Callable[[], object]) -> None:
    """Calls `do` in process 0 and waits for it in all; errors are those of `in_every_process`."""
    in_every_process(do if is_main_process() else lambda: None)


def from_main_process(find: Callable[[], Any]) -> Any:
    """Returns in all processes what `find` returns in process 0, a JSON value; errors are those of
    `in_every_process`.
    """
    values: list[Any] = []
    in_main_process(lambda: values.append(find()))
    return json.loads(all_gather_bytes(json.dumps(values).encode())[0])[0]


def in_every_process(do: Callable[[], object]) -> None:
    """Calls `do` in every process and waits for all. An error is raised in every process: itself
    where it came up, elsewhere a DistributedError with its text and the number of the process.
    Every process must call it at the same place.
    """
    refusal: Exception | None = None
    try:
        do()
    except Exception as error:
        refusal = error
    # An empty text means success, so an error without a message sends the name of its class.
    text = "" if refusal is None else str(refusal) or type(refusal).__name__
    texts = all_gather_bytes(text.encode())
    if refusal is not None:
        raise refusal
    for number, message in enumerate(texts):
        if message:
            raise DistributedError(f"process {number}: {message.decode()}")


def any_process(flag: bool) -> bool:
    """Returns whether `flag` is true anywhere. Every process must call it at the same place."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def require_equal_across_processes(values: dict[str, Any], remedy: str) -> None:
    """Raises ConfigError, in every process, for the first of these JSON values (by name) that
    differs from that of process 0. `remedy` ends the message.
    """
    expected, *rest = (json.loads(text) for text in all_gather_bytes(json.dumps(values).encode()))
    for number, actual in enumerate(rest, 1):
        for name in {**expected, **actual}:
            one, other = expected.get(name), actual.get(name)
            text = f"{name} is {one!r} in process 0 and {other!r} in process {number}: {remedy}"
            check(one == other, text)
