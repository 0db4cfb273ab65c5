"""The environment variables that start several processes, and the behaviour of a single process in
functions that exchange values among several."""

import os
import subprocess
import sys

import jax
import pytest

from compass_jax.config import ConfigError
from compass_jax.devices import distributed

GOOD = {"COMPASS_COORDINATOR": "10.0.0.1:8476", "COMPASS_PROCESSES": "4", "COMPASS_PROCESS_ID": "3"}


@pytest.fixture
def joined(monkeypatch):
    """Records the arguments of jax.distributed.initialize."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: calls.append(options))
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setenv("PJRT_NPROC", "1")
    for name in (*distributed.VARIABLES, "COMPASS_DISTRIBUTED"):
        monkeypatch.delenv(name, raising=False)
    return calls


C, P, ID = GOOD  # variables of the coordinator, the number of processes, the id
BAD = {
    "no coordinator": ({C: ""}, f"{C} not set, but {P}, {ID}: set all of"),
    "no count": ({P: ""}, f"{P} not set, but {C}, {ID}"),
    "only an id": ({C: "", P: ""}, f"{C}, {P} not set, but {ID}"),
    "no port": ({C: "10.0.0.1"}, f"{C} = '10.0.0.1': must be host:port of process 0"),
    "count": ({P: "many"}, f"{P} = 'many': must be a number of at least 1"),
    "id": ({ID: "4"}, rf"{ID} = '4': must be in 0\.\.3 \({P} = 4\)"),
    "auto": (
        dict.fromkeys(GOOD, "") | {"COMPASS_DISTRIBUTED": "yes"},
        "COMPASS_DISTRIBUTED = 'yes': only 'auto' is known",
    ),
}


@pytest.mark.parametrize("bad", list(BAD))
def test_variables_that_cannot_be_used_are_named(bad, joined, monkeypatch):
    changes, message = BAD[bad]
    for name, value in (GOOD | changes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        distributed.initialize()
    assert joined == []


def test_what_jax_is_told(joined, monkeypatch):
    assert not distributed.initialize() and joined == []
    monkeypatch.setenv("COMPASS_DISTRIBUTED", "auto")
    assert distributed.initialize() and joined == [{"heartbeat_timeout_seconds": 60}]
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    assert distributed.initialize()
    assert joined.pop() == {
        "coordinator_address": "10.0.0.1:8476",
        "num_processes": 4,
        "process_id": 3,
        "heartbeat_timeout_seconds": 10,
    }
    monkeypatch.setenv("COMPASS_COORDINATOR", "127.0.0.1:8476")
    assert distributed.initialize() and joined.pop()["coordinator_bind_address"] == "127.0.0.1:8476"
    monkeypatch.setenv("COMPASS_PROCESSES", "1")
    monkeypatch.setenv("COMPASS_PROCESS_ID", "0")
    assert not distributed.initialize()


def test_processes_that_do_not_meet_are_told_where(joined, monkeypatch):
    def fail(**options):
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out\nand much more")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        distributed.DistributedError,
        match=(
            r"did not meet at 10\.0\.0\.1:8476: DEADLINE_EXCEEDED: Barrier timed out; start the"
            r" same"
        ),
    ):
        distributed.initialize()


def test_a_command_of_one_process_is_refused_in_several(joined, monkeypatch):
    distributed.require_single_process("compass filter")
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match="compass filter runs in one process: unset COMPASS_COORDINATOR"
    ):
        distributed.require_single_process("compass filter")


def test_one_process_asks_nobody(joined):
    with distributed.processes():
        assert distributed.is_main_process() and joined == []
    assert distributed.all_gather_bytes(b"x") == [b"x"]
    assert distributed.any_process(True) and not distributed.any_process(False)
    distributed.require_equal_across_processes({"seed": 1}, "")
    with pytest.raises(KeyError), distributed.processes():
        raise KeyError


AHEAD = """
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from compass_jax.devices import distributed

distributed.initialize()
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
half = jax.jit(lambda a: a / 2)

@jax.jit
def program(a):
    for _ in range(4):
        a = jax.lax.with_sharding_constraint(jax.numpy.tanh(a @ jax.numpy.roll(a.T, 1)), sharding)
    return a

a, out = jax.device_put(jax.numpy.ones((512, 512)), sharding), []
for _ in range(60):
    a = program(a)
    out += [half(a), half(a)]
jax.block_until_ready(out)
"""


def test_simulated_devices_may_lag_behind_their_host():
    """A process can launch 180 programs without waiting for one of them."""
    environment = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    completed = subprocess.run(
        [sys.executable, "-c", AHEAD], env=environment, capture_output=True, text=True, timeout=300
    )
    assert completed.returncode == 0, completed.stderr[-2000:]


def test_values_that_differ_are_named_with_the_process(monkeypatch):
    monkeypatch.setattr(
        distributed,
        "all_gather_bytes",
        lambda payload: [payload, payload, b'{"rl.steps": 3, "seed": 1}'],
    )
    distributed.require_equal_across_processes({"rl.steps": 3, "seed": 1}, "")
    with pytest.raises(
        ConfigError,
        match=r"^rl\.steps is 2 in process 0 and 3 in process 2: start the same command$",
    ):
        distributed.require_equal_across_processes(
            {"rl.steps": 2, "seed": 1}, "start the same command"
        )


def test_an_error_in_any_process_is_raised_in_every_one(monkeypatch):
    def fail():
        raise OSError("disk full")

    with pytest.raises(OSError, match=r"^disk full$"):
        distributed.in_every_process(fail)
    distributed.in_every_process(lambda: None)
    monkeypatch.setattr(distributed, "all_gather_bytes", lambda payload: [payload, b"disk full"])
    with pytest.raises(distributed.DistributedError, match=r"^process 1: disk full$"):
        distributed.in_every_process(lambda: None)
    monkeypatch.setattr(distributed, "all_gather_bytes", lambda payload: [payload, b""])
    with pytest.raises(OSError, match=r"^disk full$"):
        distributed.in_every_process(fail)


def test_payloads_of_any_size_come_back_whole(monkeypatch):
    """There are two processes, and the other one sends the same payload."""
    monkeypatch.setattr(distributed, "process_index_and_count", lambda: (0, 2))
    sizes = []

    def gather(x):
        sizes.append(x.size)
        return distributed.np.stack([x, x])

    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", gather)
    for size in (0, 1, 1024, 1025, 5000):
        payload = bytes(i % 256 for i in range(size))
        assert distributed.all_gather_bytes(payload) == [payload, payload]
    assert sizes[1::2] == [1024, 1024, 1024, 2048, 8192]


@pytest.mark.parametrize(
    "error,code,message",
    [
        (ConfigError("seed is bad"), 2, "process 1 of 2: seed is bad"),
        (distributed.DistributedError("gone"), 1, "process 1 of 2: gone"),
        (
            jax.errors.JaxRuntimeError("UNKNOWN: Gloo: reset by peer\nmore"),
            75,
            "when another process is lost: UNKNOWN: Gloo: reset by peer; start the same command",
        ),
        (ZeroDivisionError(), 1, "ZeroDivisionError"),
        (SystemExit(143), 143, "ended from outside"),
        (KeyboardInterrupt(), 130, "ended from outside"),
    ],
)
def test_what_ends_a_process_is_told(error, code, message, capsys, monkeypatch):
    monkeypatch.setattr(distributed.time, "sleep", lambda seconds: None)
    assert distributed._report_error("process 1 of 2", error) == code
    assert message in capsys.readouterr().err
