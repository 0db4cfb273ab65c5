"""uvicorn's HTTP connections with deadlines: for headers, bodies and readers; and a server that
always ends when told.

Every connection is in one phase. Those that nobody answers (idle, sending a header or a body, not
reading) are closed when their time is over, and the oldest of them when a new connection finds all
places taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from compass_jax.config import ConfigError
from compass_jax.serving.errors import error_body
from compass_jax.serving.limits import BACKLOG, Limits
from compass_jax.serving.metrics import Metrics

MOST_BODIES_SKIPPED = (
    4  # times the limit; so much of a body that was refused is read, for its sender to read why
)


class Phase(enum.Enum):
    """What a connection does now."""

    IDLE = "idle"
    HEADER = "header"
    BODY = "body"
    ANSWER = "answer"


class Connection(H11Protocol):
    """One client's connection. `refuse` answers in the place of the application, and closes."""

    def __init__(self, limits: Limits, metrics: Metrics, **options: Any):
        super().__init__(**options)
        self._limits = limits
        self._metrics = metrics
        self._phase: tuple[Phase, object] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._received = 0  # bytes since the phase began
        self.since = 0.0  # when the phase, or the stall in it, began

    @property
    def evictable(self) -> bool:
        """Whether nobody waits for an answer here, or does not read it."""
        return self._stall is not None or (
            self._phase is not None and self._phase[0] is not Phase.ANSWER
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts the connection, and closes the oldest idle or slow one where there are too
        many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # every byte that is not taken counts as a stall
        self._enter(Phase.HEADER, None)
        if len(self.connections) > self._limits.connections:
            others: Any = self.connections
            slow = [
                c for c in others if c is not self and c.evictable and not c.transport.is_closing()
            ]
            if slow:
                self._metrics.closed.add("room")
                min(slow, key=lambda c: c.since).transport.abort()
            else:
                self.refuse(
                    503,
                    f"all {self._limits.connections} connections are being answered: try "
                    f"again later",
                )

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the deadlines, and tells the application."""
        self._phase = None
        self._disarm()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses what came, in pieces, so that a long header is refused before it is parsed."""
        for start in range(0, len(data), self._limits.header_bytes):
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + self._limits.header_bytes])
        if self.transport.is_closing():
            return
        self._received += len(data)
        if self._received > MOST_BODIES_SKIPPED * self._limits.body_bytes:
            self._give_up("size")
        else:
            self._look()

    def on_response_complete(self) -> None:
        """Starts the next request."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._look()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP: uvicorn calls this while it handles the parser's error, which
        knows the status."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        self.refuse(status, f"this is no HTTP request: {error}"[:200])

    def refuse(self, status: int, message: str) -> None:
        """Answers in the place of the application where no answer has begun, and closes."""
        if self.transport.is_closing():
            return
        self._metrics.requests.add("other", status)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        if self.cycle is not None:
            self.cycle.disconnected = True  # what the application still sends goes nowhere
            self.cycle.message_event.set()
        body = error_body(message, status)
        length = str(len(body)).encode()
        head = [
            (b"content-type", b"application/json"),
            (b"content-length", length),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=status, headers=head),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def shutdown(self) -> None:
        """No further request: closes now, or after the answer that is under way."""
        if self._phase is not None and self._phase[0] is Phase.ANSWER:
            self.cycle.keep_alive = False
        elif self._phase is None or self._phase[0] is not Phase.BODY:
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection."""
        if not self.transport.is_closing():
            self.transport.close()

    def pause_writing(self) -> None:
        """The reader has not taken everything: from now on it has `stall_s`."""
        super().pause_writing()
        if self._stall is None:
            self.since = self.loop.time()
            self._stall = self.loop.call_later(self._limits.stall_s, self._give_up, "stall")

    def resume_writing(self) -> None:
        """The reader has taken everything."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _look(self) -> None:
        """Enters the phase that the parser's and the application's states say."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.conn.their_state is h11.SEND_BODY:
            phase = Phase.BODY
        elif answering:
            phase = Phase.ANSWER
        elif self.timeout_keep_alive_task is not None:
            phase = Phase.IDLE
        else:
            phase = Phase.HEADER
        if self.cycle is not None and (self._phase is None or self.cycle is not self._phase[1]):
            self._close_after_two_lengths()
        if (phase, self.cycle) != self._phase:
            self._enter(phase, self.cycle)

    def _close_after_two_lengths(self) -> None:
        """Has the connection closed after the answer to a request with both Content-Length and
        Transfer-Encoding: a proxy in front may see its end elsewhere (RFC 9112, 6.3).
        """
        headers: Any = self.cycle.scope["headers"]
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            headers.append((b"connection", b"close"))

    def _enter(self, phase: Phase, cycle: object) -> None:
        self._phase = (phase, cycle)
        self._received = 0
        self.since = self.loop.time()
        self._disarm()
        seconds = {Phase.HEADER: self._limits.header_s, Phase.BODY: self._limits.body_s}.get(phase)
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._overdue, phase, seconds)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _overdue(self, phase: Phase, seconds: float) -> None:
        self._metrics.closed.add(phase.value)
        if phase is Phase.HEADER and not self._received:
            self.transport.close()  # nothing was asked, nothing is answered
        else:
            self.refuse(408, f"the request's {phase.value} did not come within {seconds:g} s")

    def _give_up(self, reason: str) -> None:
        self._metrics.closed.add(reason)
        self.transport.abort()


class Server(uvicorn.Server):
    """A uvicorn server on a socket that is bound. Told to end, it lets running answers go on for
    `stop_s`, then cuts them off; after `end_s` the process ends whatever goes on in it."""

    def __init__(self, config: uvicorn.Config, listening: socket.socket, limits: Limits):
        super().__init__(config)
        self._socket = listening
        self._limits = limits
        self.on_started: Callable[[], None] = lambda: None

    @property
    def address(self) -> tuple[str, int]:
        """Where the server listens: (host, port)."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until told to end. ConfigError where another process listens there by now."""
        super().run(sockets or [self._socket])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, and calls `on_started`."""
        try:
            await super().startup(sockets)
        except OSError as error:
            raise ConfigError(
                f"the server cannot listen on {self._socket.getsockname()}: {error.strerror}"
            ) from error
        self.on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the door, waits for running answers, and then for nobody."""
        for listener in self.servers:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._ended(self._limits.stop_s)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self._ended(1.0)
        for task in list(self.server_state.tasks):
            task.cancel()

    async def _ended(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        state = self.server_state
        while (state.connections or state.tasks) and loop.time() < until and not self.force_exit:
            await asyncio.sleep(0.02)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends the server at SIGTERM and SIGINT, as a wish and no failure: neither is raised again
        afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begins the end; a second ctrl-c cuts running answers off."""
        if not self.should_exit:
            last = threading.Timer(self._limits.end_s, _end_now)
            last.daemon = True
            last.start()
        super().handle_exit(sig, frame)


def _end_now() -> None:
    os.write(2, b"compass serve: work that could not be interrupted was cut off\n")
    os._exit(1)


def http_server(app: Any, listening: socket.socket, limits: Limits, metrics: Metrics) -> Server:
    """A server of `app` on a bound socket, ready to `run`."""

    def connection(**options: Any) -> Connection:
        return Connection(limits, metrics, **options)

    config = uvicorn.Config(
        app,
        http=connection,  # type: ignore[arg-type]
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]
        h11_max_incomplete_event_size=limits.header_bytes,
    )
    server = Server(config, listening, limits)
    metrics.watch(
        "compass_connections",
        "Connections that are open.",
        lambda: len(server.server_state.connections),
    )
    return server
