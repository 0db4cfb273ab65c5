"""The training's side of disaggregated rollout: a pool of samplers that come and go.

Each process of the training has a `Pool`. The one of process 0 leads: it accepts samplers and the
other processes, decides everything, and sends each decision to the others as an event. All
processes apply the same events in the same order, so that their host state stays equal without a
collective: a rollout's thread must not start one while the training runs.

Weights reach the samplers in three phases. Prepare: every process of the training offers its pieces
of the new version. Transfer: each sampler pulls the pieces that it needs. Commit: once all samplers
have them, all change to them. A sampler that joins later gets the newest version alone.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import jax
import numpy as np

from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.config import SamplersConfig
from compass_jax.config.samplers import parse_address
from compass_jax.rollout.remote import frames, weights
from compass_jax.rollout.remote.frames import Message, SamplersError, StoppedWaiting
from compass_jax.rollout.remote.leader import DIRECT, FAN_OUT, IDLE_S, Group, Leader
from compass_jax.rollout.request import Request

NOTE_AFTER = 20  # waits of IDLE_S before a note
MEET_S = 300.0  # within which the processes of the training must have met


class Pool:
    """The samplers of a run. Use it as a context manager; every process of the training has one.
    `note` prints a line of the run's progress.
    """

    def __init__(self, config: SamplersConfig):
        self.config = config
        self.note: Callable[[str], None] = print
        self.stopped: Callable[[], bool] = lambda: False  # whether this process should stop
        self._secret = frames.secret()
        self.address = parse_address(config.address, "samplers.address")
        self.process, self.processes = jax.process_index(), jax.process_count()
        self._events: queue.SimpleQueue[Message] = queue.SimpleQueue()  # of jobs
        self._gathered: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = self._finished = False
        self._jobs = self._numbers = 0
        # the newest weights: their number and arrays; and the number of those in use
        self._weights: tuple[int, Tree] = 0, None
        self._committed = self._forgets = self._forgotten = 0
        self._pieces: list[dict] = []
        # (sampler, number of the weights) -> first transfer, count of transfers
        self._offers: dict[tuple[int, int], tuple[int, int]] = {}
        self._needs: dict[int, list] = {}  # sampler -> the pieces that it needs
        self._leader = Leader(self) if self.process == 0 else None
        self._link: Connection | None = None
        self._children: list[Connection] = []  # processes to which this one passes events on
        self._routes: dict[int, np.ndarray] = {}  # of finished samples, by number

    # ---- the run's interface ---------------------------------------------------------------------

    def __enter__(self) -> Pool:
        if self._leader is not None:
            self._leader.listen()
            self._server = weights.WeightServer(frames.resolved(self.address[0]))
            self._leader.start(self._server.address)
            if not self._leader.met.wait(MEET_S):
                raise SamplersError(
                    f"not all {self.processes} processes of the training came to"
                    f" {self.config.address} within {MEET_S:.0f} s"
                )
        else:
            self._link = _meet(self.address)
            host = frames.local_host(self._link)
            self._server = weights.WeightServer(host)
            self._listener = socket.create_server((host, 0))
            hello: JsonObject = {"role": "trainer", "process": self.process}
            hello |= {"server": self._server.address, "relay": self._listener.getsockname()}
            self._send(Message("hello", hello))
            self._start(self._follow, self._link, 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self.fail(SamplersError("the run has ended"))
        if self._leader is not None:
            self._leader.close()
        elif self._link is not None:
            self._link.close()

    def finish(self) -> None:
        """Ends the samplers: the run is complete. Without it they wait for the run to continue."""
        if self._leader is not None:
            self._leader.put("finish", {})
        self._wait(lambda: self._finished)

    def use(self, settings: JsonObject) -> None:
        """Tells the samplers which engine to run. They drop their weights. Every process of the
        training must call it at the same place.
        """
        self.forget_weights()
        if self._leader is not None:
            self._leader.put("setup", settings)

    def forget_weights(self) -> None:
        """Releases the newest weights, before new ones are made. Every process of the training must
        call it at the same place.
        """
        self._forgets += 1
        if self._leader is not None:
            self._leader.put("forget", {})
        # an event, so that no sampler is offered weights that another process has released
        self._wait(lambda: self._forgotten >= self._forgets)

    def publish(self, version: int, tree: Tree) -> None:
        """Gives the samplers the weights of a policy version, and waits until they use them. Every
        process of the training must call it at the same place.
        """
        with self._changed:
            number = self._weights[0] + 1
            self._weights, self._pieces = (number, tree), weights.pieces_of(tree)
            self._changed.notify_all()
        if self._leader is not None:
            self._leader.put("published", {"number": number, "version": version})
        self._wait(lambda: self._committed >= number)

    def _wait(self, condition: Callable[[], bool]) -> None:
        waited = 0
        with self._changed:
            while not condition():
                self._raise()
                self._changed.wait(IDLE_S)
                waited += 1
                if waited == NOTE_AFTER and self._leader is not None:
                    self.note(f"waiting for samplers: {self._leader.state()}")

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns the payloads of all processes of the training, like
        distributed.all_gather_bytes, but without a collective.
        """
        if self.processes == 1:
            return [payload]
        if self._leader is not None:
            self._leader.put("exchange", {"process": 0}, payload)
        else:
            fields = {"process": self.process}
            self._send(Message("exchange", fields, frames.as_array(payload)))
        return self._take(self._gathered)

    def open(self, fields: JsonObject, most: int, holders: np.ndarray) -> int:
        """Returns the number of a new job; the samplers drop the last one. `holders`: which
        processes `[processes rows]` hold the rows of its routes.
        """
        self._jobs += 1
        for number in [n for n in list(self._routes) if n < self._numbers]:
            del self._routes[number]  # of a sample that was dropped
        if self._leader is not None:
            job = {"job": self._jobs, **fields, "rows": most}
            self._leader.inbox.put((None, Message("open", job, {"holders": holders})))
        return self._jobs

    def submit(
        self,
        job: int,
        requests: Sequence[Request],
        routes: Sequence[np.ndarray | None],
        columns: range,
    ) -> list[int]:
        """Queues samples of one prompt, with the routes of those that have tokens. Returns their
        numbers.
        """
        numbers = list(range(self._numbers, self._numbers + len(requests)))
        self._numbers += len(requests)
        if self._leader is not None:
            recorded = {n: x for n, x in zip(numbers, routes, strict=True) if x is not None}
            group = Group(job, dict(zip(numbers, requests, strict=True)), recorded, columns)
            self._leader.inbox.put((None, group))
        return numbers

    def routes(self, number: int) -> np.ndarray:
        """Waits for the routes `[t l k]` of a finished sample, whose row this process holds."""
        self._wait(lambda: number in self._routes)
        return self._routes.pop(number)

    def abort(self, job: int) -> None:
        """Asks for the unfinished samples; the event "aborted" comes after the last of them."""
        if self._leader is not None:
            self._leader.put("abort", {"job": job})

    def next_event(self) -> Message:
        """Waits for the next event of a job: `done`, `cut`, `aborted` or `idle`."""
        return self._take(self._events)

    # ---- events, in the same order in every process ----------------------------------------------

    def apply(self, event: Message) -> None:
        """Applies an event of process 0."""
        fields = event.fields
        if event.kind == "joined":
            self._needs[fields["sampler"]] = _needs(fields["needs"])
        elif event.kind == "offer":
            self._offer(fields["sampler"], fields["number"], fields["first"])
        elif event.kind == "pulled":
            self._forget(fields["sampler"], fields["number"])
        elif event.kind == "lost":
            self._forget(fields["sampler"])
            self._needs.pop(fields["sampler"], None)
        elif event.kind == "committed":
            self._committed = fields["number"]
        elif event.kind == "forget":
            self._weights = self._weights[0], None
            self._forgotten += 1
        elif event.kind == "exchange":
            self._gathered.put([event.arrays[str(n)].tobytes() for n in range(self.processes)])
        elif event.kind == "routes":
            self._routes[fields["sample"]] = event.arrays["routes"]
        elif event.kind == "relay":
            first = self.process * FAN_OUT + 1
            children = fields["addresses"][first : first + FAN_OUT]
            self._children = [frames.connect((host, port)) for host, port in children]
            # afterwards, so that the children miss no event
            self._start(self._follow_parent)
        elif event.kind == "finished":
            self._finished = True
        elif event.kind == "failed":
            error = StoppedWaiting if fields.get("stopped") else SamplersError
            self.fail(error(fields["why"]))
        else:
            self._events.put(event)
        with self._changed:
            self._changed.notify_all()

    def plan(self, sampler: int) -> weights.Plan:
        """Returns the pulls of the newest weights by a sampler, the same in every process."""
        return weights.plan_pulls(self._needs[sampler], self._pieces, sampler)

    def fail(self, error: BaseException) -> None:
        """Ends every wait with an error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _offer(self, sampler: int, number: int, first: int) -> None:
        with self._changed:
            # process 0 may be ahead of this one
            self._changed.wait_for(lambda: self._weights[0] >= number or self._closed)
            tree = self._weights[1]
        plan = self.plan(sampler)
        self._offers[sampler, number] = first, sum(map(len, plan))
        self._server.offer(tree, plan, first)

    def _forget(self, sampler: int, number: int | None = None) -> None:
        """Forgets the offer of weights that a sampler has pulled; None: all to one that is lost."""
        for key in [x for x in self._offers if x[0] == sampler and number in (None, x[1])]:
            self._server.forget(*self._offers.pop(key), pulled=number is not None)

    def _start(self, target: Callable[..., None], *args: Tree) -> None:
        threading.Thread(target=target, args=args, name="samplers", daemon=True).start()

    def _follow_parent(self) -> None:
        """Applies the events that another process passes on, once it has connected."""
        parent = None
        while self.process > FAN_OUT and parent is None:
            with contextlib.suppress(*frames.REFUSED):  # a stranger
                parent = frames.accept(self._listener.accept()[0])
        self._listener.close()
        if parent is not None:
            self._follow(parent, (self.process - 1) // FAN_OUT)

    def _follow(self, connection: Connection, sender: int) -> None:
        """Applies the events that a process sends to this one, and passes them on."""
        try:
            while True:
                data = frames.receive(connection)
                message = frames.decode(data)
                if message.kind not in DIRECT:
                    self._pass_on(data)
                self.apply(message)
        except (EOFError, OSError) as error:
            # The events before it, or its reason, may be under way through another process.
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._error, frames.GREETING_S)
            if not self._closed:
                text = f"process {sender} of the training has left {self.config.address}: {error}"
                self.fail(SamplersError(text))
        except BaseException as error:
            self.fail(error)

    def _pass_on(self, data: bytes) -> None:
        for child in self._children:
            try:
                frames.send(child, data)
            except OSError:  # lost, or it has not read for too long: process 0 notices it
                frames.shut_down(child)

    def _send(self, message: Message) -> None:
        assert self._link is not None
        frames.send(self._link, frames.encode(message))

    def _take(self, source: queue.SimpleQueue) -> Tree:
        while True:
            # The wait is split, because an error does not put anything into the queue.
            with contextlib.suppress(queue.Empty):
                return source.get(timeout=IDLE_S)
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _needs(needs: list) -> list:
    return [[[weights.as_bounds(x) for x in leaf] for leaf in leaves] for leaves in needs]


def _meet(address: tuple[str, int]) -> Connection:
    """Connects with process 0, which may start later."""
    limit = time.monotonic() + MEET_S
    while True:
        try:
            return frames.connect(address)
        except AuthenticationError as error:
            raise SamplersError(
                f"process 0 of the training has another {frames.KEY_VARIABLE}"
            ) from error
        except OSError as error:
            if time.monotonic() > limit:
                raise SamplersError(f"process 0 is not at {address}: {error.strerror}") from error
            time.sleep(0.2)
