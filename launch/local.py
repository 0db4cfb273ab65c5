"""Several processes on this machine, each with simulated CPU devices, running the command that a
pod would run.

    python launch/local.py --processes 2 --devices-per-process 4 -- compass train
        configs/tiny_reasoning_cpu.py --mesh.fsdp 8 --run-dir runs/two

Every process gets COMPASS_COORDINATOR, COMPASS_PROCESSES and COMPASS_PROCESS_ID, from which the
command joins the others. Process 0 writes to this console as if it were alone; the lines of the
others begin with their number. SIGINT and SIGTERM are passed on to all of them. When one fails, the
others have --grace seconds to notice before they are killed. The exit status is that of the first
that failed (128 + signal where a signal ended it).
"""

import argparse
import contextlib
import importlib.util
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

CLONE = Path(__file__).resolve().parents[1]
DEVICE_FLAG = "--xla_force_host_platform_device_count"
EXAMPLE = (
    "python launch/local.py --processes 2 --devices-per-process 4 -- compass train"
    " configs/tiny_reasoning_cpu.py --mesh.fsdp 8"
)


def free_port() -> int:
    """Returns a port of the loopback interface on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def settings(
    process: int, processes: int, devices: int, port: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables that process number `process` gets on top of `environ`; other XLA flags
    stay unchanged.
    """
    other_flags = [
        flag for flag in environ.get("XLA_FLAGS", "").split() if flag.split("=")[0] != DEVICE_FLAG
    ]
    variables = {
        "COMPASS_COORDINATOR": f"127.0.0.1:{port}",
        "COMPASS_PROCESSES": str(processes),
        "COMPASS_PROCESS_ID": str(process),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*other_flags, f"{DEVICE_FLAG}={devices}"]),
    }
    # process 0 writes as it would alone, the others into a pipe
    return variables | ({"PYTHONUNBUFFERED": "1"} if process else {})


def resolve(command: Sequence[str]) -> list[str]:
    """Returns the command, in which `compass` is that of this interpreter, whatever is on PATH; any
    other command stays unchanged.
    """
    if Path(command[0]).name == "compass":
        python = [sys.executable, "-P", "-m", "compass_jax"]  # -P: not from the current folder
        if importlib.util.find_spec("compass_jax") is None:
            path = [str(CLONE), os.environ.get("PYTHONPATH", "")]
            python = ["env", f"PYTHONPATH={os.pathsep.join(filter(None, path))}", *python]
        return [*python, *command[1:]]
    return list(command)


def script(command: Sequence[str], variables: Sequence[Mapping[str, str]]) -> str:
    """Returns the same launch as shell commands, which --dry-run prints."""
    lines = [
        shlex.join(
            ["env", "-u", "COMPASS_DISTRIBUTED", *(f"{k}={v}" for k, v in each.items()), *command]
        )
        + " &"
        for each in variables
    ]
    return "\n".join([*lines, "wait"])


def exit_status(returncode: int) -> int:
    """Returns the exit status of a process as a shell reports it: 128 + signal if a signal ended
    the process.
    """
    return returncode if returncode >= 0 else 128 - returncode


def relay(prefix: str, source, target) -> None:
    """Copies whole lines, each behind `prefix`, until `source` ends."""
    for line in source:
        target.write(prefix + line if line.endswith("\n") else f"{prefix}{line}\n")
        target.flush()


def kill_group(leader: int) -> None:
    """Kills the remaining processes of a group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


class Group:
    """The processes of one launch. Each leads a separate process group, so that its children can be
    ended with it.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Sequence[Mapping[str, str]],
        environ: Mapping[str, str],
    ):
        self.processes: list[subprocess.Popen] = []
        self.relays: list[threading.Thread] = []
        base = {name: value for name, value in environ.items() if name != "COMPASS_DISTRIBUTED"}
        try:
            for number, each in enumerate(variables):
                self._start(number, command, base | dict(each))
        except OSError:
            self.kill()
            raise

    def _start(self, number: int, command: Sequence[str], environ: dict[str, str]) -> None:
        pipe = None if number == 0 else subprocess.PIPE
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self.processes.append(process)
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                self.relays.append(
                    threading.Thread(
                        target=relay, args=(f"[{number}] ", source, target), daemon=True
                    )
                )
                self.relays[-1].start()

    def forward(self, signum: int, frame: object = None) -> None:
        """Sends a signal to every process that still runs; each passes it on to its children."""
        for process in self.processes:
            process.send_signal(signum)

    def kill(self) -> None:
        """Ends every process that still runs, with its children."""
        for process in self.processes:
            if process.returncode is None:
                kill_group(process.pid)

    def wait(self, grace_s: float) -> int:
        """Waits for all processes; returns the status of the first that failed, 0 if none did."""
        running = dict(enumerate(self.processes))
        failed, deadline = 0, float("inf")
        while running:
            finished = [number for number, process in running.items() if process.poll() is not None]
            for number in finished:
                process = running.pop(number)
                kill_group(process.pid)  # the remaining children
                status = exit_status(process.returncode)
                if status and not failed:
                    failed, deadline = status, time.monotonic() + grace_s
                    notice = f"; the others have {grace_s:g} s" if running else ""
                    print(
                        f"launch: process {number} ended with status {status}{notice}",
                        file=sys.stderr,
                    )
            if running and time.monotonic() > deadline:
                print(f"launch: killing process {', '.join(map(str, running))}", file=sys.stderr)
                deadline = float("inf")
                self.kill()
            if running and not finished:
                time.sleep(0.05)
        for thread in self.relays:
            thread.join(timeout=5)
        return failed


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line; everything behind -- is the command."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="launch/local.py", description=__doc__, formatter_class=formatter, allow_abbrev=False
    )
    parser.add_argument("--processes", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument(
        "--devices-per-process",
        type=int,
        default=4,
        help="simulated devices of each (default: %(default)s)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        help="seconds that the others have once one failed (default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands instead of running them"
    )
    split = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    args.command = list(argv[split + 1 :])
    if not args.command:
        parser.error(f"the command is missing: write it behind --, for example\n  {EXAMPLE}")
    if args.processes < 1 or args.devices_per_process < 1:
        parser.error("--processes and --devices-per-process are at least 1")
    return args


def main(argv: Sequence[str]) -> int:
    """Launches the processes, or prints the commands; returns the exit status."""
    args = parse(argv)
    port, command = free_port(), resolve(args.command)
    variables = [
        settings(i, args.processes, args.devices_per_process, port, os.environ)
        for i in range(args.processes)
    ]
    if args.dry_run:
        print(script(command, variables))
        return 0
    early: list[int] = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, frame: early.append(number))
    try:
        group = Group(command, variables, os.environ)
    except OSError as error:
        print(f"launch: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, group.forward)
    for signum in early:
        group.forward(signum)
    return group.wait(args.grace)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
