"""A sampler: `compass sample ADDRESS` generates samples for a training run, with the weights that
the run sends. It may run in several processes, of which the first one talks with the training.

It holds no state that the training lacks. If the sampler or its connection is lost, its unfinished
samples start again in another sampler, or in this one when the training is back.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from compass_jax.base.aliases import Tree
from compass_jax.base.errors import CompassError
from compass_jax.config.io import from_plain
from compass_jax.config.samplers import parse_address
from compass_jax.devices.distributed import all_gather_bytes, is_main_process
from compass_jax.devices.sharding import fetch, placements
from compass_jax.model.moe import unset_id
from compass_jax.rollout.batcher import Batcher
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.remote import frames, weights
from compass_jax.rollout.remote.frames import Message, SamplersError
from compass_jax.rollout.remote.requests import requests_of, results
from compass_jax.rollout.remote.settings import EngineSettings
from compass_jax.rollout.request import Request
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.rollout.sizes import resume_bucket, share
from compass_jax.rollout.state import lay
from compass_jax.rollout.stats import RolloutStats
from compass_jax.weights.sync import sampler_weights

RETRY_S = 1.0
MOST_FAILURES = 3  # transfers of weights that may fail, one after the other
COUNTERS = tuple(asdict(RolloutStats()))


class Link:
    """The connection with the training, of the sampler's first process. It reconnects after a loss,
    and gives up after `patience_s` seconds without the training.
    """

    def __init__(self, address: tuple[str, int], patience_s: float):
        self.address, self._patience_s = address, patience_s
        self._connection: Connection | None = None
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lost_at = time.monotonic()
        self.host = ""  # this host's address, as the training reaches it
        self._sending = threading.Lock()
        threading.Thread(target=self._show_alive, daemon=True).start()

    def _show_alive(self) -> None:
        while True:
            time.sleep(frames.ALIVE_S)
            self.send(Message("alive"))

    def receive(self, wait: bool) -> list[bytes]:
        """Returns the messages that have come; with `wait`, waits a while for the first."""
        if self._connection is None:
            self._connect()
        messages = []
        try:
            messages.append(self._inbox.get(wait, RETRY_S) if wait else self._inbox.get_nowait())
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def send(self, message: Message) -> None:
        """Sends a message, or drops it without a connection: lost samples start again anyway."""
        with self._sending:
            connection = self._connection
            if connection is not None:
                with contextlib.suppress(OSError):  # its reader notices it
                    frames.send(connection, frames.encode(message))

    def drop(self) -> None:
        """Ends the connection; a new one follows."""
        if (connection := self._connection) is not None:
            frames.shut_down(connection)

    def _connect(self) -> None:
        try:
            connection = frames.connect(self.address)
        except AuthenticationError as error:
            raise SamplersError(f"the training has another {frames.KEY_VARIABLE}") from error
        except (OSError, EOFError, AssertionError) as error:
            if time.monotonic() - self._lost_at > self._patience_s:
                raise SamplersError(
                    f"no training at {self.address[0]}:{self.address[1]} for"
                    f" {self._patience_s:.0f} s: {error}; check samplers.address of the run, or"
                    " raise --patience-s"
                ) from error
            time.sleep(RETRY_S)
            return
        self.host = frames.local_host(connection)
        self._connection = connection
        threading.Thread(target=self._read, args=(connection,), daemon=True).start()
        self.send(Message("hello", hello()))

    def _read(self, connection: Connection) -> None:
        try:
            while True:
                self._inbox.put(frames.receive(connection))
        except (EOFError, OSError):
            self._inbox.put(frames.encode(Message("lost")))
            self._lost_at, self._connection = time.monotonic(), None
            connection.close()


def hello() -> dict[str, Tree]:
    """Returns the fields of a sampler's first message."""
    return {
        "role": "sampler",
        "name": f"{socket.gethostname()} (pid {os.getpid()}, {jax.device_count()} devices)",
        "version": metadata.version("compass_jax"),
        "platform": jax.devices()[0].platform,
    }


class SamplerLoop:
    """Runs the requests of a training. Every process of the sampler handles the same messages."""

    def __init__(self, address: str, patience_s: float):
        frames.secret()
        console = Console(soft_wrap=True, emoji=False, quiet=not is_main_process())
        self._note = partial(console.print, highlight=False, markup=False)
        where = parse_address(address, "ADDRESS")
        self._link = Link(where, patience_s) if is_main_process() else None
        self._engine: Engine | None = None
        self._structs: Tree = None
        self._settings: EngineSettings | None = None
        self._client: weights.WeightClient | None = None
        self._params: Tree = None  # used
        self._next: Tree = None  # transferred, not used yet
        self._version = -1
        self._failures = 0
        self._end()

    def run(self) -> None:
        """Serves the training until it ends. Raises SamplersError if it cannot be reached."""
        self._note("waiting for the training")
        try:
            while self._tick():
                pass
        except CompassError as error:
            self._send(Message("failed", {"why": str(error)}))
            raise

    def _tick(self) -> bool:
        """Handles new messages, and decodes once. Returns whether the training continues."""
        for message in self._receive():
            if message.kind == "end":
                self._note("the training has ended")
                return False
            getattr(self, f"_on_{message.kind}")(message)
        if self._batcher is not None and self._batcher.busy:
            self._step()
        return True

    def _receive(self) -> list[Message]:
        """Returns the new messages of the first process, in every process."""
        payload = b""
        if self._link is not None:
            busy = self._batcher is not None and self._batcher.busy
            parts = enumerate(self._link.receive(wait=not busy))
            arrays = {str(n): np.frombuffer(part, np.uint8) for n, part in parts}
            payload = frames.encode(Message("messages", {}, arrays))
        batch = frames.decode(all_gather_bytes(payload)[0])
        return [frames.decode(part.tobytes()) for part in batch.arrays.values()]

    def _send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)

    def _end(self) -> None:
        """Drops the present job."""
        self._job: dict[str, Tree] = {}
        self._batcher: Batcher | None = None
        self._requests: dict[int, Request] = {}
        self._free: list[int] = []
        self._counted = RolloutStats()

    # ---- messages --------------------------------------------------------------------------------

    def _on_lost(self, message: Message) -> None:
        self._note("the training is gone; waiting for it")
        time.sleep(RETRY_S)
        self._end()
        self._params = self._next = self._client = None
        self._version = -1

    def _on_refused(self, message: Message) -> None:
        raise SamplersError(f"the training refuses this sampler: {message.fields['why']}")

    def _on_setup(self, message: Message) -> None:
        """Makes the engine, and sends the pieces of the weights that it needs."""
        self._end()
        self._params = self._next = None
        fields = {k: v for k, v in message.fields.items() if k != "number"}
        settings = from_plain(EngineSettings, fields)
        if settings != self._settings:
            placement = placements(settings.mesh, None, False)[1]
            options = settings.model, settings.compute, settings.rollout
            self._engine = Engine(*options, settings.end_ids, placement, settings.known)
            self._settings = settings
            self._structs = sampler_weights(
                settings.model,
                settings.compute.dtype,
                settings.quantize,
                settings.stored,
                placement,
                self._engine.layout,
            )
        needs = weights.needs_of(self._structs, jax.process_count())
        self._send(Message("needs", {"needs": needs, "settings": message.fields["number"]}))

    def _on_transfer(self, message: Message) -> None:
        """Pulls new weights. Without samples under way the old ones are released before."""
        fields = message.fields
        if self._batcher is None or not self._batcher.busy:
            self._params = None
            self._batcher = None
        if self._client is None:
            hosts = all_gather_bytes(self._link.host.encode() if self._link else b"")
            self._client = weights.WeightClient(fields["addresses"], self._host(hosts[0].decode()))
        plan, self._next, failure = weights.from_json(fields["plan"]), None, ""
        try:
            self._next = self._client.pull(self._structs, plan, fields["first"])
        except (jax.errors.JaxRuntimeError, SamplersError) as error:
            failure = str(error)
        # Failures are exchanged, because all processes must take the same branch below.
        failures = [x.decode() for x in all_gather_bytes(failure.encode()) if x]
        if failures:
            # most likely the training was lost; else it offers the weights to a new connection
            self._failures += 1
            self._note(f"the transfer of weights failed: {failures[0]}")
            if self._failures == MOST_FAILURES:
                raise SamplersError(f"{MOST_FAILURES} transfers of weights failed: {failures[0]}")
            if self._link is not None:
                self._link.drop()
            return
        self._failures = 0
        self._send(Message("ready", {"number": fields["number"]}))

    def _on_commit(self, message: Message) -> None:
        """Changes to the new weights."""
        self._params, self._next = self._next, None
        self._version = message.fields["version"]
        if self._batcher is not None:
            self._batcher.renew(self._params, self._version)

    def _on_open(self, message: Message) -> None:
        self._end()
        self._job = message.fields

    def _on_work(self, message: Message) -> None:
        """Queues samples of one prompt."""
        fields, engine = message.fields, self._engine
        if fields["job"] != self._job.get("job") or engine is None:
            return
        if self._batcher is None:
            self._batcher = self._open()
        numbers = [n for n, *_ in fields["samples"]]
        rows = [self._free.pop() for _ in numbers]
        requests = requests_of(message, rows)
        buffer = self._batcher.routes
        if buffer is not None and buffer.rows is not None:
            for n, request in requests.items():
                if (routes := message.arrays.get(f"{n}.routes")) is not None:
                    padded = np.full(buffer.rows.shape[1:], unset_id(routes.dtype), routes.dtype)
                    padded[: len(routes)] = routes
                    buffer.rows = _stored(engine, buffer.rows, jnp.int32(request.row), padded)
        self._requests |= requests
        self._batcher.add(list(requests.values()), range(*fields["columns"]))

    def _on_abort(self, message: Message) -> None:
        """Returns the unfinished samples that have tokens, and drops the others."""
        if self._batcher is not None and message.fields["job"] == self._job.get("job"):
            unfinished = set(self._batcher.abort())
            self._report("cut", [n for n, x in self._requests.items() if x in unfinished])
            self._batcher = None
            self._requests, self._free = {}, []
        self._send(Message("aborted", {"job": message.fields["job"]}))

    # ---- sampling --------------------------------------------------------------------------------

    def _open(self) -> Batcher:
        assert self._engine is not None and self._settings is not None
        job, rows = self._job, self._job["rows"]
        buffer = self._engine.route_buffer(1, rows, job["routes"])
        buffer.allocate()
        self._free, self._counted = list(range(rows)), RolloutStats()
        return self._engine.batcher(
            self._params,
            Purpose(job["purpose"]),
            job["seed"],
            sampler=Sampler(**job["sampler"]),
            version=self._version,
            routes=buffer,
            stats=RolloutStats(),
        )

    def _step(self) -> None:
        assert self._batcher is not None
        finished = set(self._batcher.step())
        if finished:
            self._report("done", [n for n, x in self._requests.items() if x in finished])

    def _report(self, kind: str, numbers: Sequence[int]) -> None:
        """Sends samples with their routes, and frees their rows."""
        assert self._batcher is not None
        requests = {n: self._requests.pop(n) for n in numbers}
        message = results(kind, self._job["job"], requests, self._routes(requests))
        stats, counted = self._batcher.stats, self._counted
        new = {name: getattr(stats, name) - getattr(counted, name) for name in COUNTERS}
        self._counted = replace(stats)
        self._send(message._replace(fields={**message.fields, "stats": new}))
        self._free += [x.row for x in requests.values()]

    def _routes(self, requests: dict[int, Request]) -> dict[int, np.ndarray]:
        """Returns the routes `[t l k]` of these requests, which all processes fetch together."""
        assert self._batcher is not None and self._engine is not None
        buffer: RouteBuffer | None = self._batcher.routes
        if buffer is None or buffer.rows is None or not requests:
            return {}
        config, size = self._engine.config, share(self._engine.config)
        routes, items = dict[int, np.ndarray](), list(requests.items())
        # Rows and lengths are padded to a few sizes, each of which is a program. The padding row
        # is out of range.
        for at in range(0, len(items), size):
            part = items[at : at + size]
            longest = max(len(x.tokens) for _, x in part)
            rows = [x.row for _, x in part] + [len(buffer)] * (size - len(part))
            length = resume_bucket(config, longest)
            stored = self._engine.stored_routes(buffer.rows, jnp.asarray(rows, jnp.int32), length)
            host = fetch(stored)
            routes |= {n: host[i, : len(x.tokens)] for i, (n, x) in enumerate(part)}
        return routes

    def _host(self, host: str) -> str:
        """Returns the address of this process: that of the first one on its host."""
        return host if self._link is not None or host.startswith("127.") else _outward(host)


def _outward(host: str) -> str:
    """Returns this host's address towards another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return probe.getsockname()[0]


# The store is donated, so that a row can be written in place.
@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _stored(engine: Engine, store: Tree, row: Tree, routes: Tree) -> Tree:
    return lay(engine.placement, store.at[row].set(routes), "batch")
