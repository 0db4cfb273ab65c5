"""Who may ask: the first thing that a request meets. Host, Origin, key, kind and size are checked;
answers are counted.

A browser on this machine reaches a server on loopback. So a page of another origin must not start
work (its requests name their Origin, or are no JSON), and a name that an attacker points at this
machine (DNS rebinding) is not ours.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from compass_jax.config import ConfigError
from compass_jax.serving.errors import BadRequest
from compass_jax.serving.limits import Limits
from compass_jax.serving.metrics import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

KEY_VARIABLE = "COMPASS_API_KEY"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
LEFT = 499  # the client went before an answer began
OPEN_PATHS = ("/health",)  # for whoever looks whether the server lives
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/?#\s]+)(?::(\d{1,5}))?", re.IGNORECASE)
_KEY = re.compile(r"[\x21-\x7e]{8,1024}")


def resolve_key(given: str | None, loopback: bool) -> str | None:
    """The key that every client must bring: `--api-key`, or the environment's; None where it is
    needless.

    ConfigError, which never shows the key, for one that cannot be sent, or where other machines
    would need none.
    """
    key = os.environ.get(KEY_VARIABLE) if given is None else given
    source = KEY_VARIABLE if given is None else "--api-key"
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
    """An ASGI application around another one. `hosts` are names that clients may call this server,
    beside those of loopback and the address at which they reached it."""

    def __init__(
        self, app: Any, hosts: Iterable[str], key: str | None, limits: Limits, metrics: Metrics
    ):
        for host in hosts:
            if not (found := _AUTHORITY.fullmatch(host)) or found[2]:
                raise ConfigError(
                    f"--allow-host {host[:200]!r}: give a name or an address, without a port"
                )
        self._app = app
        self._named = {_bare(host) for host in hosts}
        self._key = None if key is None else key.encode()
        self._limits = limits
        self._metrics = metrics
        self._routes = frozenset(app.routes)  # paths that are counted by name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses, or lets the application answer; counts what was answered, and how long it
        took."""
        if scope["type"] != "http":
            return
        scope["begun"] = begun = time.monotonic()
        route = scope["path"] if scope["path"] in self._routes else "other"
        status = LEFT

        async def counted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, counted)
        except BadRequest as error:
            await send_error(counted, error)
        except Exception:
            if status != LEFT:
                raise  # uvicorn logs it, and closes
            logging.getLogger(__name__).exception("a request failed")
            await send_error(counted, BadRequest("the server has failed", status=500))
        finally:
            self._metrics.requests.add(route, status)
            self._metrics.latency.observe(route, time.monotonic() - begun)

    def _check(self, scope: Scope) -> None:
        """BadRequest for a request that goes no further."""
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        if sum(len(name) + len(value) for name, value in headers) > self._limits.header_bytes:
            self._refuse("header", 431, f"the header exceeds {self._limits.header_bytes} bytes")
        if scope["method"] == "CONNECT":
            raise BadRequest("this is no proxy", status=405)
        host = _only(headers, "host")
        self._check_host(scope, host)
        self._check_origin(_only(headers, "origin"), host)
        if self._key is not None and scope["path"] not in OPEN_PATHS:
            self._check_key(_only(headers, "authorization"))
        if scope["method"] == "POST":
            kind = (_only(headers, "content-type") or "").partition(";")[0].strip().lower()
            if kind != "application/json":
                self._refuse("content_type", 415, "the content-type must be application/json")

    def _check_host(self, scope: Scope, host: str | None) -> None:
        if host is None:
            return  # HTTP/1.0, which no browser speaks
        reached = (scope.get("server") or ("",))[0]
        if _name(host) not in {*LOOPBACK, _bare(reached), *self._named}:
            text = f"this server is not known as {host[:100]!r}; --allow-host adds a name"
            self._refuse("host", 421, text)

    def _check_origin(self, origin: str | None, host: str | None) -> None:
        if origin is None:
            return
        try:
            parts = urlsplit(origin)
        except ValueError:
            parts = urlsplit("")
        web = parts.scheme in ("http", "https") and bool(parts.netloc)
        same = host is not None and parts.netloc.lower() == host.lower()
        if not web or not (same or _name(parts.netloc) in self._named):
            self._refuse("origin", 403, f"pages of {origin[:100]!r} may not ask this server")

    def _check_key(self, authorization: str | None) -> None:
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            key.strip().encode("latin-1"), self._key or b""
        ):
            text = "the key is missing or wrong: send the header Authorization: Bearer KEY"
            self._refuse("key", 401, text, "invalid_api_key")

    def _refuse(self, reason: str, status: int, message: str, code: str | None = None) -> None:
        self._metrics.rejected.add(reason)
        raise BadRequest(message, status=status, code=code)


async def send_error(send: Send, error: BadRequest) -> None:
    """Sends an error as a whole answer."""
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    more = {
        401: [(b"www-authenticate", b"Bearer")],
        429: [(b"retry-after", b"1")],
        503: [(b"retry-after", b"1")],
    }
    headers += [*more.get(error.status, []), *error.headers]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _only(headers: list[tuple[str, str]], name: str) -> str | None:
    """The value of a header that may come once. BadRequest where it comes twice."""
    found = [value for key, value in headers if key == name]
    if len(found) > 1:
        raise BadRequest(f"the header {name} comes {len(found)} times")
    return found[0] if found else None


def _name(authority: str) -> str | None:
    found = _AUTHORITY.fullmatch(authority)
    return _bare(found[1]) if found else None


def _bare(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()
