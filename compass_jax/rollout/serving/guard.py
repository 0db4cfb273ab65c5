"""Access control: checks the Host, Origin and API key of each request, and counts responses.

A browser on this machine can reach a server on loopback. Pages of other origins must not start
work; their requests have an Origin header or are not JSON. A host name that an attacker points at
this machine (DNS rebinding) is rejected by the Host check.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import time
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compass_jax.config import ConfigError
from compass_jax.rollout.serving.errors import ApiError
from compass_jax.rollout.serving.metrics import LATENCY, REQUESTS

KEY_VARIABLE = "COMPASS_API_KEY"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
CLIENT_LEFT = 499  # status counted if the client disconnects before the response
OPEN_PATHS = ("/health",)  # paths that need no key
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/?#\s]+)(?::(\d{1,5}))?", re.IGNORECASE)
_KEY = re.compile(r"[\x21-\x7e]{8,1024}")


def resolve_key(option: str | None, loopback: bool) -> str | None:
    """Returns the key that every client must send, from `--api-key` or the environment; None if no
    key is needed.

    Raises ConfigError, without showing the key, for an invalid key, and for a missing key if other
    machines can reach the server.
    """
    key = os.environ.get(KEY_VARIABLE) if option is None else option
    source = KEY_VARIABLE if option is None else "--api-key"
    if key is not None and not _KEY.fullmatch(key):
        raise ConfigError(
            f"{source} must be 8 to 1024 characters of ASCII, without white space; it has "
            f"{len(key)}"
        )
    if key is None and not loopback:
        raise ConfigError(
            f"other machines can reach this host, and without a key whoever does may use "
            f"it: set {KEY_VARIABLE} "
            "(or --api-key), or serve on 127.0.0.1"
        )
    return key


class Guard:
    """An ASGI middleware that checks requests.

    `hosts` are the names by which clients may call this server, in addition to loopback names and
    the address on which the request arrived. `routes` are the paths that metrics count by name.
    The key comes as Authorization: Bearer KEY, or alone in a `key_header`. Bodies have one of the
    `content_types`, none of which a browser's page may send without asking first.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Iterable[str],
        hosts: Iterable[str],
        key: str | None,
        *,
        key_header: str = "",
        content_types: Sequence[str] = ("application/json",),
    ):
        for host in hosts:
            if not (match := _AUTHORITY.fullmatch(host)) or match[2]:
                raise ConfigError(
                    f"--allow-host {host[:200]!r}: give a name or an address, without a port"
                )
        self._app = app
        self._routes = frozenset(routes)
        self._named = {_normalise_host(host) for host in hosts}
        self._key = None if key is None else key.encode()
        self._key_header, self._content_types = key_header, content_types

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Rejects a request or passes it to the application; records the status and the latency."""
        scope["began"] = began = time.monotonic()
        route = scope["path"] if scope["path"] in self._routes else "other"
        headers = Headers(scope=scope)
        # A reverse proxy may disagree about where such a request ends (RFC 9112, 6.3).
        closes = "content-length" in headers and "transfer-encoding" in headers
        status = CLIENT_LEFT

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if closes:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, receive, counted)
        except ApiError as error:
            await error_response(error)(scope, receive, counted)
        except Exception:  # Starlette has answered with 500
            logging.getLogger(__name__).exception("a request failed")
        finally:
            REQUESTS.labels(route, status).inc()
            LATENCY.labels(route).observe(time.monotonic() - began)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raises ApiError for a request that is rejected."""
        host = headers.get("host")
        if host is not None:  # None: HTTP/1.0, which no browser speaks
            reached = (scope.get("server") or ("",))[0]
            if _host_of(host) not in {*LOOPBACK, _normalise_host(reached), *self._named}:
                text = f"this server is not known as {host[:100]!r}; --allow-host adds a name"
                raise ApiError(text, status=421)
        for origin in headers.getlist("origin"):
            if not self._is_own(origin, host):
                raise ApiError(f"pages of {origin[:100]!r} may not ask this server", status=403)
        if self._key is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            form = "Authorization: Bearer KEY"
            if self._key_header:
                scheme, key = "bearer", headers.get(self._key_header, "")
                form = f"{self._key_header}: KEY"
            matches = hmac.compare_digest(key.strip().encode("latin-1"), self._key)
            if scheme.lower() != "bearer" or not matches:
                text = f"the key is missing or wrong: send the header {form}"
                raise ApiError(text, status=401, code="invalid_api_key")
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind not in self._content_types:
                text = f"the content-type must be {' or '.join(self._content_types)}"
                raise ApiError(text, status=415)

    def _is_own(self, origin: str, host: str | None) -> bool:
        """Returns whether pages of this origin may send requests."""
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        is_host = host is not None and parts.netloc.lower() == host.lower()
        web = parts.scheme in ("http", "https") and bool(parts.netloc)
        return web and (is_host or _host_of(parts.netloc) in self._named)


def error_response(error: ApiError) -> Response:
    """Returns an error as a complete HTTP response."""
    return Response(error.body(), error.status, error.headers, "application/json")


def _host_of(authority: str) -> str | None:
    match = _AUTHORITY.fullmatch(authority)
    return _normalise_host(match[1]) if match else None


def _normalise_host(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()
