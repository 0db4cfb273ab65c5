"""The watchdog of a process that stands still."""

import io
import socket
import subprocess
import sys
import time

import pytest
from rich.console import Console

from compass_jax.runs.telemetry import Telemetry

BEATS = """
import time
from compass_jax.runs.watchdog import Watchdog

watchdog = Watchdog(2)
for _ in range(6):  # 3 s
    time.sleep(0.5)
    watchdog.beat()
print("alive", flush=True)


def hangs():
    time.sleep(600)


watchdog.close() if CLOSES else hangs()
"""
COLLECTIVE = """
import sys, time
import jax
from compass_jax.runs.watchdog import Watchdog

jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize("localhost:PORT", 2, int(sys.argv[1]))
from jax.experimental.multihost_utils import process_allgather

process_allgather(jax.numpy.ones(2))
print("met", flush=True)
Watchdog(5)


def skips():
    time.sleep(600)


def joins():
    process_allgather(jax.numpy.ones(2))


skips() if int(sys.argv[1]) else joins()
"""


def start(code, *words):
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("closes", [False, True])
def test_it_ends_a_process_that_does_not_beat(closes):
    process = start(BEATS.replace("CLOSES", str(closes)))
    out, err = process.communicate(timeout=60)
    assert out == "alive\n"
    assert process.returncode == (0 if closes else 1)
    assert ("in hangs" in err) is not closes


def test_processes_of_which_one_skips_a_collective_end_with_their_stacks():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        code = COLLECTIVE.replace("PORT", str(free.getsockname()[1]))
    processes = [start(code, str(index)) for index in (0, 1)]
    began = time.monotonic()
    outputs = [process.communicate(timeout=60) for process in processes]
    assert time.monotonic() - began < 60  # with the start of two interpreters
    assert all(process.returncode for process in processes)
    assert all("met\n" in out for out, _ in outputs)
    assert "in joins" in outputs[0][1] and "in skips" in outputs[1][1]


def test_each_phase_is_progress(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda s, **_: calls.append(s))
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: calls.append(0))
    for writes in (True, False):
        calls.clear()
        console = Console(file=io.StringIO())
        with Telemetry(tmp_path, 3, "rl", console=console, writes=writes, stall_s=7) as telemetry:
            telemetry.phase("rollout", 1, 4)
        assert calls == [7, 7, 0]
