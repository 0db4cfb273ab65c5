"""Process 0 of a training and its other processes, which are threads here, over loopback and
without a model: what each gets and decides, and what happens when one is lost.
"""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest
from tiny import COMPUTE, EOS, MODEL, ROLLOUT

from compass_jax.base.records import Prompt
from compass_jax.config import MeshConfig, SamplersConfig
from compass_jax.config.samplers import parse_address
from compass_jax.devices.sharding import Placement, make_mesh
from compass_jax.model.moe import unset_id
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.remote import frames, leader, pool, serve, weights
from compass_jax.rollout.remote.frames import Message, SamplersError
from compass_jax.rollout.remote.pool import Pool
from compass_jax.rollout.remote.remote import HostRoutes, RemoteBatcher, RemoteEngine
from compass_jax.rollout.request import Request
from compass_jax.rollout.sampling import Purpose, Sampler

ROWS, LENGTH, LAYERS, TOP_K = 14, 9, 3, 2
UNSET = 255


class RecordingPool(Pool):
    """A pool with a list of the events that it has applied."""

    def apply(self, event):
        self.__dict__.setdefault("applied", []).append(event)
        super().apply(event)


@pytest.fixture
def training(monkeypatch):
    """Returns a function that starts the processes of a training, with events that come over two
    others where there are more than three.
    """
    monkeypatch.setenv(frames.KEY_VARIABLE, "a key of more than sixteen characters")
    monkeypatch.setattr(weights, "WeightServer", lambda host: SimpleNamespace(address=f"{host}:0"))
    for module in (leader, pool):
        monkeypatch.setattr(module, "FAN_OUT", 2)
    pools = []

    def start(count):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            config = SamplersConfig(address=f"127.0.0.1:{probe.getsockname()[1]}")
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_count", lambda: count)
            for number in range(count):
                patch.setattr(jax, "process_index", lambda number=number: number)
                pools.append(RecordingPool(config))
        for x in pools:
            x.note = lambda text: None
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(Pool.__enter__, pools))
        # until all have connected with those that pass events on to them
        wait_for(lambda: all(x._listener.fileno() == -1 for x in pools[1:]))
        return pools

    yield start
    for x in pools:
        x.__exit__()


def holders(processes, rows):
    """Returns which processes hold each row: process 0 all, each other one a part."""
    owners = np.arange(rows) * processes // rows
    return (owners == np.arange(processes)[:, None]) | (np.arange(processes) == 0)[:, None]


class FakeEngine:
    """The part of a RemoteEngine that a batcher and its buffer use."""

    taken_routes = None
    config = SimpleNamespace(slots=4)

    def __init__(self, pool):
        self.pool = pool

    def holders(self, rows):
        return holders(self.pool.processes, rows)

    def unset_routes(self, rows):
        return np.full((rows, LENGTH, LAYERS, TOP_K), UNSET, np.uint8)


def column_of(number):
    """Returns the columns and the routes of a sample, by its number."""
    draw, size = np.random.default_rng(number), 3 + number % 5
    return {
        "tokens": draw.integers(0, 99, size, np.int32),
        "logp": draw.standard_normal(size, np.float32),
        "entropy": draw.standard_normal(size, np.float32),
        "versions": np.zeros(size, np.int32),
        "routes": draw.integers(0, 200, (size, LAYERS, TOP_K), np.uint8),
    }


@contextlib.contextmanager
def fake_sampler(pools, most=None):
    """Plays a sampler that finishes its samples at once; it leaves after `most` of them."""
    process_0 = pools[0]._leader
    link = frames.connect(parse_address(pools[0].config.address, "address"))
    known = set(process_0._samplers)
    frames.send(link, frames.encode(Message("hello", serve.hello())))
    wait_for(lambda: set(process_0._samplers) - known)
    (number,) = set(process_0._samplers) - known
    # as if it had pulled the weights, of which it needs none
    process_0._newest = process_0._samplers[number].offered = 1
    frames.send(link, frames.encode(Message("ready", {"number": 1})))

    def run():
        finished = 0
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = frames.decode(frames.receive(link))
                for n, *_ in message.fields["samples"] if message.kind == "work" else ():
                    if finished == most:
                        frames.shut_down(link)
                    finished += 1
                    fields = {"job": message.fields["job"], "samples": [n], "stats": {}}
                    arrays = {f"{n}.{name}": x for name, x in column_of(n).items()}
                    frames.send(link, frames.encode(Message("done", fields, arrays)))

    threading.Thread(target=run, daemon=True).start()
    yield
    frames.shut_down(link)


def wait_for(condition):
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def in_all(pools, call):
    """Calls a function with each process's pool, in a thread of its own."""
    with ThreadPoolExecutor(len(pools)) as threads:
        return list(threads.map(call, pools))


def started(pools):
    """Returns a batcher with a buffer of ROWS rows for each process."""
    batchers = []
    for x in pools:
        engine = FakeEngine(x)
        buffer = HostRoutes(engine, ROWS // 2, 2, True)
        for _ in range(ROWS // 2):
            buffer.allocate()
        batchers.append(RemoteBatcher(engine, Purpose.TRAIN, 0, sampler=Sampler(), routes=buffer))
    return batchers


def run(batcher):
    """Samples a row of routes after the other; returns the finished requests in order."""
    prompts = [Prompt.of_tokens([1, 2, 3], n) for n in range(ROWS // 2)]
    for n, prompt in enumerate(prompts):
        requests = [Request.of(prompt, c, 2 * n + c, LENGTH, 0) for c in range(2)]
        batcher.add(requests, range(2))
    finished = []
    while batcher.busy:
        finished += batcher.step()
    return finished


def numbers(request):
    return request.row, *(column.tolist() for column in request.columns)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_all_processes_decide_the_same_and_have_the_routes_of_their_rows(count, training):
    pools = training(count)
    all_batchers = started(pools)
    with fake_sampler(pools):
        threads = ThreadPoolExecutor(count)
        results = list(threads.map(run, all_batchers))
    decided = [[numbers(x) for x in finished] for finished in results]
    assert all(x == decided[0] for x in decided) and len(decided[0]) == ROWS
    # samples are numbered in the order of their rows
    for row, tokens, *_ in decided[0]:
        assert tokens == column_of(row)["tokens"].tolist()
    for x, batcher in zip(pools, all_batchers, strict=True):
        for row, is_held in enumerate(holders(count, ROWS)[x.process]):
            expected = np.full((LENGTH, LAYERS, TOP_K), UNSET, np.uint8)
            if is_held:
                routes = column_of(row)["routes"]
                expected[: len(routes)] = routes
            np.testing.assert_array_equal(batcher.routes.rows[row], expected)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_sample_is_encoded_once_and_its_routes_come_to_its_holders(count, training, monkeypatch):
    encoded, real = [], frames.encode
    pools = training(count)

    def encode(message):
        if message.kind in ("done", "routes"):
            encoded.append((threading.current_thread().name, message.kind))
        return real(message)

    monkeypatch.setattr(frames, "encode", encode)
    all_batchers = started(pools)
    with fake_sampler(pools):
        in_all(all_batchers, run)
    by_process_0 = [kind for thread, kind in encoded if thread == "samplers"]
    assert sorted(by_process_0) == ["done"] * ROWS + ["routes"] * ROWS
    for x in pools:
        events = [event for event in x.applied if event.kind in ("done", "routes")]
        routes = {e.fields["sample"]: e.arrays["routes"] for e in events if e.kind == "routes"}
        assert sorted(routes) == np.flatnonzero(holders(count, ROWS)[x.process]).tolist()
        assert sum(r.nbytes for r in routes.values()) == sum(
            column_of(n)["routes"].nbytes for n in routes
        )
        done = [event for event in events if event.kind == "done"]
        assert not any(name.endswith("routes") for event in done for name in event.arrays)
        assert [e.fields for e in done] == [e.fields for e in pools[0].applied if e.kind == "done"]


def test_the_samples_of_a_lost_sampler_start_again(training):
    pools = training(4)
    all_batchers = started(pools)
    threads = ThreadPoolExecutor(4)
    with fake_sampler(pools, most=5):
        results = threads.map(run, all_batchers)
        wait_for(lambda: not pools[0]._leader._samplers)
    with fake_sampler(pools):
        decided = [[numbers(x) for x in finished] for finished in results]
    assert all(x == decided[0] for x in decided)
    assert sorted(row for row, *_ in decided[0]) == list(range(ROWS))


def test_payloads_come_to_all_processes(training):
    pools = training(7)
    payloads = [bytes([x.process]) * (x.process + 1) for x in pools]
    for received in in_all(pools, lambda x: x.exchange(payloads[x.process])):
        assert received == payloads


@pytest.mark.parametrize("lost", [1, 5])
def test_a_lost_process_ends_the_others(lost, training):
    """Process 1 passes events on to 3 and 4; process 5 gets them from 2."""
    pools = training(7)
    pools[lost]._closed = True
    frames.shut_down(pools[lost]._link)
    for child in pools[lost]._children:
        frames.shut_down(child)
    why = f"process {lost} of the training is lost"
    with pytest.raises(SamplersError, match=f"^{why}"):
        pools[0].next_event()
    for x in pools[1:lost] + pools[lost + 1 :]:
        with pytest.raises(SamplersError, match=f"^process 0 of the training: {why}"):
            x.next_event()


def test_a_process_that_no_events_reach_ends_the_others(training, monkeypatch):
    """Only the connection between processes 1 and 3 breaks."""
    pools = training(7)
    monkeypatch.setattr(frames, "GREETING_S", 1)
    frames.shut_down(pools[1]._children[0])
    with pytest.raises(SamplersError, match=r"^process 1 of the training has left"):
        pools[3].next_event()
    frames.shut_down(pools[3]._link)  # its command ends by the error
    with pytest.raises(SamplersError, match="process 3 of the training is lost"):
        pools[0].next_event()


def test_the_others_end_when_process_0_is_lost(training, monkeypatch):
    pools = training(4)
    monkeypatch.setattr(frames, "GREETING_S", 1)
    pools[0].__exit__()
    for x in pools[1:]:
        with pytest.raises(SamplersError, match=r"^process 0 of the training has left"):
            x.next_event()


def test_a_finished_run_ends_all_processes(training):
    pools = training(7)
    in_all(pools, Pool.finish)


def test_results_of_samples_that_a_sampler_does_not_have_are_ignored(training):
    """One sampler reports a sample that another one has, then one that nobody has."""
    pools = training(2)
    (first, second) = started(pools)
    link = frames.connect(parse_address(pools[0].config.address, "address"))
    frames.send(link, frames.encode(Message("hello", serve.hello())))
    with fake_sampler(pools):
        for n in (0, 10**6):
            fields = {"job": 1, "samples": [n, n], "stats": {}}
            arrays = {f"{n}.{name}": x for name, x in column_of(n + 1).items()}
            frames.send(link, frames.encode(Message("done", fields, arrays)))
        threads = ThreadPoolExecutor(2)
        results = list(threads.map(run, (first, second)))
    frames.shut_down(link)
    decided = [[numbers(x) for x in finished] for finished in results]
    assert decided[0] == decided[1]
    assert decided[0][0][1] == column_of(0)["tokens"].tolist()


class Device(NamedTuple):
    """A device of a process."""

    process_index: int


class Split:
    """A placement whose rows are split over the devices of four processes, or held by all."""

    def rows(self, count):
        parts = 4 if count % 4 == 0 else 1
        devices = [Device(n) for n in range(4)]
        size = count // parts
        index = {
            device: (slice(n % parts * size, (n % parts + 1) * size),)
            for n, device in enumerate(devices)
        }
        return SimpleNamespace(devices_indices_map=lambda shape: dict(index))


def test_the_holders_of_a_row_are_process_0_and_those_whose_devices_have_it():
    engine = RemoteEngine.__new__(RemoteEngine)
    engine.pool, engine.placement = SimpleNamespace(processes=4), Split()
    expected = np.repeat(np.eye(4, dtype=bool), 2, axis=1)
    expected[0] = True
    np.testing.assert_array_equal(engine.holders(8), expected)
    assert engine.holders(7).all()


def remote_engine(mesh):
    """Returns an engine without samplers whose devices are those of a mesh."""
    engine = RemoteEngine.__new__(RemoteEngine)
    placement = None if mesh is None else Placement(make_mesh(mesh))
    Engine.__init__(engine, MODEL, COMPUTE, ROLLOUT, EOS, placement)
    engine.pool = SimpleNamespace(processes=4)
    return engine


@pytest.mark.parametrize("order", ["in order", "reversed", "some", "of a smaller step"])
def test_rows_at_places_of_other_processes_are_exchanged(order, monkeypatch):
    """Four processes with two devices each, of which the last three have unset rows of the others:
    the step's routes are those of a buffer in which all rows are set.
    """
    engine = remote_engine(MeshConfig(fsdp=8))
    monkeypatch.setattr(RemoteEngine, "holders", lambda self, rows: holders(4, rows))
    exchanged = []
    real = engine.taken_routes
    monkeypatch.setattr(
        RemoteEngine, "taken_routes", lambda self, *x: exchanged.append(1) or real(*x)
    )
    rows = {
        "in order": np.arange(16),
        "reversed": np.arange(16)[::-1],
        "some": np.where(np.arange(16) % 3, np.arange(16), np.iinfo(np.int32).max),
        "of a smaller step": np.array([3, 2, 9, 8, 15, 14, 0, np.iinfo(np.int32).max]),
    }[order].astype(np.int32)
    buffer = engine.route_buffer(8, 2, True)
    buffer.allocate()
    draw = np.random.default_rng(0)
    buffer.rows = draw.integers(0, 8, buffer.rows.shape).astype(buffer.rows.dtype)
    routes = buffer.read(rows)
    expected = np.full((len(rows), *buffer.rows.shape[1:]), unset_id(routes.dtype), routes.dtype)
    inside = rows < 16
    expected[inside] = buffer.rows[rows[inside]]
    np.testing.assert_array_equal(routes, expected)
    assert routes.sharding.is_equivalent_to(engine.placement.rows(len(rows)), routes.ndim)
    assert bool(exchanged) == (order not in ("in order", "some"))
