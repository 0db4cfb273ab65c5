"""Configuration of uvicorn: limits, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from compass_jax.rollout.serving.errors import ApiError
from compass_jax.rollout.serving.limits import Limits
from compass_jax.rollout.serving.metrics import CONNECTIONS


class Connection(H11Protocol):
    """A uvicorn connection whose own errors are in OpenAI's format. At most `max_connections` are
    open; uvicorn's own `limit_concurrency` would reject only the request, and in plain text.
    """

    def __init__(self, *args: Any, max_connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_connections = max_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Closes a connection beyond the limit with an error."""
        super().connection_made(transport)
        limit = self.max_connections
        if len(self.connections) > limit:
            self._refuse(ApiError(f"{limit} connections are open: try again later", status=503))

    def send_400_response(self, msg: str) -> None:
        """Rejects input that is not HTTP."""
        self._refuse(ApiError("this is no HTTP request"))

    def _refuse(self, error: ApiError) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # discard further output of the application
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # the response has started
            return
        body = error.body()
        head = {"content-type": "application/json", "content-length": str(len(body))}
        head |= {"connection": "close", **error.headers}
        response = h11.Response(status_code=error.status, headers=list(head.items()))
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def http_server(app: Any, limits: Limits) -> uvicorn.Server:
    """Returns a server of `app`. At shutdown running responses have `stop_s` seconds."""
    config = uvicorn.Config(
        app,
        http=partial(Connection, max_connections=limits.connections),  # type: ignore[arg-type]
        ws="none",
        loop="asyncio",
        lifespan="off",
        # Uvicorn's own configuration closes the streams of handlers that other packages have made.
        log_config=None,
        log_level="critical",  # the application logs its failures itself
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=limits.idle_s,
        timeout_graceful_shutdown=limits.stop_s,  # type: ignore[arg-type]
        h11_max_incomplete_event_size=limits.header_bytes,
    )
    server = uvicorn.Server(config)
    CONNECTIONS.set_function(lambda: len(server.server_state.connections))
    return server
