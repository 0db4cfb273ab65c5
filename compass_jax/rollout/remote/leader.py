"""Process 0 of a training with samplers: it keeps the list of samplers and gives them work.

It sends an event to FAN_OUT other processes, which pass it on to theirs, so that its work does not
grow with the training. The routes of a sample go to the processes that hold its row, directly.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from compass_jax.base.aliases import JsonObject
from compass_jax.rollout.remote import frames
from compass_jax.rollout.remote.frames import Message, SamplersError
from compass_jax.rollout.remote.requests import COLUMNS, work
from compass_jax.rollout.request import Request
from compass_jax.rollout.stats import RolloutStats

if TYPE_CHECKING:
    from compass_jax.rollout.remote.pool import Pool

MOST_BROKEN = 5  # broken results of samplers before the first sound ones
FAN_OUT = 8  # processes to which each process of the training sends an event
# Events that process 0 sends to each process itself; after the last two it may be gone.
DIRECT = frozenset({"relay", "routes", "failed", "finished"})
IDLE_S = 0.5  # between events while nothing happens, so that a rollout can look for a stop
STOPPED = (
    "the run was asked to stop while it waited for samplers, of which none is there: the same"
    " command continues from the last checkpoint"
)
VERSION = metadata.version("compass_jax")


@dataclass(eq=False)
class Peer:
    """A process that has connected to process 0: a sampler or another process of the training."""

    connection: Connection
    number: int
    name: str = ""
    heard_at: float = field(default_factory=time.monotonic)  # of its newest message
    needs: list | None = None  # of a sampler: the pieces that it needs
    offered: int = 0  # number of the weights, like the next two; 0: none
    ready: int = 0
    committed: int = 0
    job: int = 0  # the newest that it knows
    samples: dict[int, Group] = field(default_factory=dict)  # assigned and unfinished


class Group(NamedTuple):
    """Samples of one prompt that are assigned together, by number."""

    job: int
    requests: dict[int, Request]
    routes: dict[int, np.ndarray]  # of samples that have tokens
    columns: range


class Leader:
    """The connections, the queue of groups, and the groups that each sampler has."""

    def __init__(self, pool: Pool):
        self.pool = pool
        # (peer, message); of this process: (None, message or group)
        self.inbox: queue.SimpleQueue[tuple[Peer | None, Message | Group]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)  # of peers
        self._samplers: dict[int, Peer] = {}
        self._trainers: dict[int, Peer] = {}
        self._servers: dict[int, str] = {}  # process of the training -> its weight server
        # process -> the address at which it waits for the one that passes events on to it
        self._relays: dict[int, list] = {0: []}
        self._holders = np.zeros((0, 0), bool)  # [processes rows] of the job, as in Pool.open
        self._settings: JsonObject | None = None
        self._newest = self._version = 0  # number of the newest weights, and their policy version
        self._transfers = 1
        self._queue: deque[Group] = deque()
        self._job: JsonObject = {}
        self._aborting: set[int] = set()  # samplers whose answer is awaited
        self._payloads: dict[int, list[Message]] = {}  # process -> its payloads to exchange
        self._broken, self._has_results = 0, False  # number of broken results; sound ones?
        self._closed = False
        self.met = threading.Event()  # whether all processes of the training are there

    def listen(self) -> None:
        """Listens at samplers.address. Raises SamplersError if that is not possible."""
        host, port = self.pool.address
        try:
            self._listener = socket.create_server((frames.resolved(host), port), backlog=64)
        except OSError as error:
            raise SamplersError(
                f"samplers.address = {self.pool.config.address!r}: this process cannot listen"
                f" there: {error.strerror}; name an address of this host and a free port"
            ) from error

    def start(self, server: str) -> None:
        """Starts the threads; `server` is the address of this process's weight server."""
        self._servers[0] = server
        if self.pool.processes == 1:
            self.met.set()
        for loop in (self._accept, self._serve):
            threading.Thread(target=loop, name="samplers", daemon=True).start()

    def close(self) -> None:
        """Ends all connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for peer in [*self._samplers.values(), *self._trainers.values()]:
            frames.shut_down(peer.connection)

    def state(self) -> str:
        """Returns a line on the samplers."""
        names = [peer.name for peer in list(self._samplers.values())]
        if not names:
            return f"none is there; start one with compass sample {self.pool.config.address}"
        slow = [x.name for x in list(self._samplers.values()) if x.ready != self._newest]
        return f"{len(names)} are there, without the newest weights: {', '.join(slow) or 'none'}"

    def put(self, kind: str, fields: JsonObject, payload: bytes = b"") -> None:
        """Queues a message of this process."""
        self.inbox.put((None, Message(kind, fields, frames.as_array(payload))))

    # ---- connections -----------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                one, _ = self._listener.accept()
                threading.Thread(target=self._read, args=(one,), daemon=True).start()
            except (OSError, RuntimeError):  # too many connections, or threads
                time.sleep(IDLE_S)

    def _read(self, one: socket.socket) -> None:
        """Reads one peer's messages until it is lost."""
        try:
            connection = frames.accept(one)
        except frames.REFUSED:
            return
        peer = Peer(connection, next(self._numbers))
        try:
            while True:
                message = frames.decode(frames.receive(connection))
                peer.heard_at = time.monotonic()
                if message.kind != "alive":
                    self.inbox.put((peer, message))
        except (EOFError, OSError, SamplersError) as error:
            self.inbox.put((peer, Message("lost", {"why": str(error)})))

    def _serve(self) -> None:
        # All decisions are made in this thread, so that events have one order.
        try:
            while not self._closed:
                self._drop_silent()
                try:
                    peer, message = self.inbox.get(timeout=IDLE_S)
                except queue.Empty:
                    if self.pool.stopped() and not self._samplers:
                        self._tell_all(Message("failed", {"why": STOPPED, "stopped": True}))
                    if self._queue or any(x.samples for x in self._samplers.values()):
                        self._tell_all(Message("idle"))
                    continue
                if not self._closed:
                    self._handle(peer, message)
        except BaseException as error:
            self.pool.fail(error)
            with contextlib.suppress(Exception):
                self._tell_all(Message("failed", {"why": f"process 0 of the training: {error}"}))

    def _handle(self, peer: Peer | None, message: Message | Group) -> None:
        if isinstance(message, Group):
            self._queue.append(message)
            self._assign()
        elif peer is None:
            getattr(self, f"_on_{message.kind}")(message)
        else:
            refusal = _refusal(message, self._job)
            if refusal:
                self._end_broken(peer, message.kind, refusal)
            else:
                getattr(self, f"_peer_{message.kind}")(peer, message)

    def _end_broken(self, peer: Peer, kind: str, refusal: str) -> None:
        """Ends a connection. Raises SamplersError after MOST_BROKEN broken results if there were
        no sound ones: samples would start again for ever.
        """
        name = peer.name or "a process"
        self._broken += kind in ("done", "cut")
        if self._broken >= MOST_BROKEN and not self._has_results:
            raise SamplersError(
                f"the first {MOST_BROKEN} results of samplers are broken, the last from {name}:"
                f" {refusal}; install the same version of compass_jax on all hosts"
            )
        self.pool.note(f"{name} sent a broken message: {refusal}")
        frames.shut_down(peer.connection)

    def _drop_silent(self) -> None:
        """Ends the connection of samplers that have been silent for too long."""
        for peer in self._samplers.values():
            if time.monotonic() - peer.heard_at > frames.SILENT_S:
                frames.shut_down(peer.connection)

    def _tell(self, peer: Peer, message: Message) -> None:
        self._send(peer, frames.encode(message))

    def _send(self, peer: Peer, data: bytes) -> None:
        try:
            frames.send(peer.connection, data)
        except (OSError, ValueError):  # lost, or it has not read for too long
            frames.shut_down(peer.connection)

    def _tell_all(self, event: Message) -> None:
        """Sends an event to the other processes of the training, and applies it in this one."""
        last = self.pool.processes - 1 if event.kind in DIRECT else FAN_OUT
        self._tell_processes(event, range(1, last + 1))

    def _tell_processes(self, event: Message, processes: Iterable[int]) -> None:
        data = frames.encode(event)
        for process in processes:
            if process in self._trainers:
                self._send(self._trainers[process], data)
        self.pool.apply(event)

    def _tell_results(self, peer: Peer, message: Message) -> None:
        """Sends a sampler's samples to all processes, and the routes to those that hold them."""
        fields, arrays = message.fields, dict(message.arrays)
        if fields["job"] != self._job.get("job"):
            return
        assigned = {n: peer.samples.pop(n) for n in fields["samples"] if n in peer.samples}
        for n, group in assigned.items() if self._job["routes"] else ():
            event = Message("routes", {"sample": n}, {"routes": arrays.pop(f"{n}.routes")})
            self._tell_processes(event, np.flatnonzero(self._holders[:, group.requests[n].row]))
        self._tell_all(Message(message.kind, {**fields, "samples": [*assigned]}, arrays))

    # ---- messages of peers -----------------------------------------------------------------------

    def _peer_hello(self, peer: Peer, message: Message) -> None:
        fields = message.fields
        if fields["role"] == "trainer":
            process = fields["process"]
            if process in self._trainers:
                frames.shut_down(peer.connection)  # of a second training with the same address
                return
            peer.name = f"process {process} of the training"
            self._trainers[process], self._servers[process] = peer, fields["server"]
            self._relays[process] = fields["relay"]
            if len(self._servers) == self.pool.processes:
                addresses = [self._relays[n] for n in range(self.pool.processes)]
                for trainer in self._trainers.values():
                    self._tell(trainer, Message("relay", {"addresses": addresses}))
                self.met.set()
            return
        peer.name = f"sampler {fields['name']}"
        needed = {"version": VERSION, "platform": jax.devices()[0].platform}
        wrong = [
            f"{k} {fields.get(k)!r}, not {v!r}" for k, v in needed.items() if fields.get(k) != v
        ]
        if wrong:
            self._refuse(peer, f"it has {'; '.join(wrong)}, as the training has")
            return
        self._samplers[peer.number] = peer
        if self._settings is not None:
            self._tell(peer, Message("setup", self._settings))

    def _refuse(self, peer: Peer, why: str) -> None:
        self._tell(peer, Message("refused", {"why": why}))
        self.pool.note(f"{peer.name} is refused: {why}")

    def _peer_needs(self, peer: Peer, message: Message) -> None:
        if message.fields["settings"] != (self._settings or {}).get("number"):
            return  # of earlier settings
        peer.needs = message.fields["needs"]
        self.pool.note(f"{peer.name} has joined")
        self._tell_all(Message("joined", {"sampler": peer.number, "needs": peer.needs}))
        self._offer_to_all()

    def _peer_ready(self, peer: Peer, message: Message) -> None:
        peer.ready = message.fields["number"]
        self._tell_all(Message("pulled", {"sampler": peer.number, "number": peer.ready}))
        self._commit()

    def _peer_done(self, peer: Peer, message: Message) -> None:
        self._has_results = True
        self._tell_results(peer, message)
        self._assign()

    def _peer_cut(self, peer: Peer, message: Message) -> None:
        self._tell_results(peer, message)

    def _peer_aborted(self, peer: Peer, message: Message) -> None:
        peer.samples.clear()
        self._answered(peer.number, message.fields["job"])

    def _peer_exchange(self, peer: Peer, message: Message) -> None:
        self._on_exchange(message)

    def _peer_failed(self, peer: Peer, message: Message) -> None:
        """Reports a sampler that cannot continue; its message "lost" follows."""
        self.pool.note(f"{peer.name} has failed: {message.fields['why']}")

    def _peer_lost(self, peer: Peer, message: Message) -> None:
        peer.connection.close()
        if peer in self._trainers.values():
            raise SamplersError(f"{peer.name} is lost")
        if self._samplers.get(peer.number) is not peer:
            return
        del self._samplers[peer.number]
        self.pool.note(f"{peer.name} is lost; {len(peer.samples)} samples start again")
        # the groups in the order of their samples, without the finished ones
        groups = {id(group): group for group in peer.samples.values()}.values()
        left = [
            group._replace(requests={n: x for n, x in group.requests.items() if n in peer.samples})
            for group in groups
        ]
        # extendleft reverses the order, so the groups return to the front as they were.
        self._queue.extendleft(reversed(left))
        self._tell_all(Message("lost", {"sampler": peer.number}))
        self._answered(peer.number, self._job.get("job", 0))
        self._commit()
        self._assign()

    # ---- messages of this process ----------------------------------------------------------------

    def _on_setup(self, message: Message) -> None:
        number = 1 + (self._settings or {"number": 0})["number"]
        self._settings, self._newest = {**message.fields, "number": number}, 0
        self._queue.clear()
        for peer in self._samplers.values():
            peer.needs, peer.offered, peer.ready, peer.committed = None, 0, 0, 0
            peer.samples.clear()
            self._tell(peer, Message("setup", self._settings))

    def _on_finish(self, message: Message) -> None:
        for peer in self._samplers.values():
            self._tell(peer, Message("end"))
        self._closed = True
        self._tell_all(Message("finished"))

    def _on_forget(self, message: Message) -> None:
        self._newest = 0
        self._tell_all(message)

    def _on_published(self, message: Message) -> None:
        self._newest, self._version = message.fields["number"], message.fields["version"]
        self._offer_to_all()

    def _on_open(self, message: Message) -> None:
        self._job, self._holders = message.fields, message.arrays["holders"]
        self._queue.clear()
        self._aborting.clear()
        for peer in self._samplers.values():
            peer.samples.clear()
            self._tell(peer, Message("open", self._job))
            peer.job = self._job["job"]

    def _on_abort(self, message: Message) -> None:
        self._queue.clear()
        self._aborting = {n for n, peer in self._samplers.items() if peer.samples}
        for number in self._aborting:
            self._tell(self._samplers[number], message)
        if not self._aborting:
            self._tell_all(Message("aborted", message.fields))

    def _on_exchange(self, message: Message) -> None:
        """Sends the payloads of all processes to all, once the last one is there."""
        self._payloads.setdefault(message.fields["process"], []).append(message)
        if all(self._payloads.get(n) for n in range(self.pool.processes)):
            payloads = [self._payloads[n].pop(0) for n in range(self.pool.processes)]
            arrays = {str(n): x.arrays["payload"] for n, x in enumerate(payloads)}
            self._tell_all(Message("exchange", {}, arrays))

    # ---- decisions -------------------------------------------------------------------------------

    def _offer_to_all(self) -> None:
        """Offers the newest weights to every sampler that lacks them."""
        if not self._newest:
            return
        for peer in list(self._samplers.values()):
            if peer.needs is None or peer.offered == self._newest:
                continue
            try:
                plan = self.pool.plan(peer.number)
            except ValueError as error:
                peer.needs = None
                self._refuse(peer, f"its layout of the weights: {error}")
                continue
            peer.offered, first = self._newest, self._transfers
            fields: JsonObject = {"sampler": peer.number, "number": self._newest, "first": first}
            self._tell_all(Message("offer", fields))
            # Each leaf of each process has a transfer number that is never used again.
            self._transfers += sum(map(len, plan))
            addresses = [self._servers[n] for n in range(self.pool.processes)]
            fields |= {"addresses": addresses, "plan": plan}
            self._tell(peer, Message("transfer", fields))

    def _commit(self) -> None:
        """Lets the samplers change to the newest weights once all that were offered have them."""
        offered = [x for x in self._samplers.values() if x.offered == self._newest > 0]
        if not offered or any(peer.ready != self._newest for peer in offered):
            return
        new = [peer for peer in offered if peer.committed != self._newest]
        for peer in new:
            peer.committed = self._newest
            self._tell(peer, Message("commit", {"version": self._version}))
        if new:
            self._tell_all(Message("committed", {"number": self._newest}))
            self._assign()

    def _assign(self) -> None:
        """Gives the waiting groups to the samplers with the most room."""
        while self._queue and not self._aborting:
            usable = [x for x in self._samplers.values() if x.committed == self._newest > 0]
            peer = min(usable, key=lambda x: len(x.samples), default=None)
            if peer is None:
                return
            group = self._queue[0]
            if peer.samples and len(peer.samples) + len(group.requests) > self._job["rows"]:
                return
            self._queue.popleft()
            if group.job != self._job["job"]:
                continue
            if group.job != peer.job:
                self._tell(peer, Message("open", self._job))
                peer.job = group.job
            peer.samples |= dict.fromkeys(group.requests, group)
            self._tell(peer, work(group.job, group.requests, group.routes, group.columns))

    def _answered(self, sampler: int, job: int) -> None:
        if sampler in self._aborting:
            self._aborting.discard(sampler)
            if not self._aborting:
                self._queue.clear()
                self._tell_all(Message("aborted", {"job": job}))


# kind of a peer's message -> the types of its fields
_FIELDS: dict[str, dict[str, type]] = {
    "needs": {"needs": list, "settings": int},
    "ready": {"number": int},
    "done": {"job": int, "samples": list, "stats": dict},
    "cut": {"job": int, "samples": list, "stats": dict},
    "aborted": {"job": int},
    "failed": {"why": str},
    "exchange": {"process": int},
    "lost": {},
}
_HELLO: dict[str, dict[str, type]] = {
    "sampler": {"name": str},
    "trainer": {"process": int, "server": str, "relay": list},
}
_COUNTERS = frozenset(asdict(RolloutStats()))


def _refusal(message: Message, job: JsonObject) -> str:
    """Returns the fault of a peer's message; empty for a sound one."""
    fields = message.fields
    types = _FIELDS.get(message.kind)
    if message.kind == "hello":
        types = _HELLO.get(str(fields.get("role")))
    if types is None:
        return f"kind {message.kind!r}"
    for name, kind in types.items():
        if not isinstance(fields.get(name), kind):
            return f"{message.kind}: {name} is {fields.get(name)!r:.80}"
    if message.kind not in ("done", "cut"):
        return ""
    if not fields["stats"].keys() <= _COUNTERS:
        return f"{message.kind}: unknown counters"
    columns = (*COLUMNS, "routes") if fields["job"] == job.get("job") and job["routes"] else COLUMNS
    for sample in fields["samples"]:
        if type(sample) is not int:
            return f"{message.kind}: a sample is {sample!r:.80}"
        missing = [name for name in columns if f"{sample}.{name}" not in message.arrays]
        if missing:
            return f"{message.kind}: sample {sample} has no {', '.join(missing)}"
    return ""
