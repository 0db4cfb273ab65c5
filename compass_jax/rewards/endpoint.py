"""Client of an OpenAI-compatible endpoint, which may be down or slow or return malformed responses.

Requests are sent by the trainer's process, because verifier workers have no network. Responses are
untrusted: they have limits of time and size, and a response that is not the expected JSON is a
named failure.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from compass_jax.config import ConfigError, JudgeConfig
from compass_jax.untrusted import UntrustedError, parse_json

CONNECT_S = 10.0  # timeout of connecting
MOST_BYTES = 8 * 2**20  # maximum size of a response
MOST_DETAIL = 300  # characters
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
RETRIED = (408, 409, 425, 429)  # HTTP statuses that are retried, as are all from 500

UNREACHABLE, LATE, NONSENSE, REFUSED = "unreachable", "late", "nonsense", "refused"


class Reply(NamedTuple):
    """A text, or the failure (UNREACHABLE, LATE, NONSENSE or REFUSED) with its detail."""

    text: str
    failure: str = ""
    detail: str = ""
    thought: str = ""  # chain of thought, if the endpoint returns it separately
    tokens: int = 0  # tokens of thought and text; 0 if the endpoint reports none
    whole: bool = True  # whether the answer ended before the token limit


class _Response(NamedTuple):
    status: int
    body: bytes
    pause_s: float  # the endpoint's Retry-After


class Endpoint:
    """Sends questions to the judge of `config`. Thread-safe; up to `requests` threads may call it
    at once.

    Raises ConfigError if the environment variable `key_env` holds no key. `key` is the section of
    the settings, for messages.
    """

    def __init__(self, config: JudgeConfig, key: str = "rewards.judge"):
        self._config = config
        self._url = urlsplit(config.endpoint.rstrip("/") + "/chat/completions")
        self._key = _key(config.key_env, key)
        self._closing = threading.Event()
        self._failures = 0  # consecutive requests that reached no endpoint
        self._sockets: set[Any] = set()
        self._lock = threading.Lock()

    def __call__(self, messages: Sequence[dict[str, str]]) -> Reply:
        """Returns the judge's answer within `timeout_s`, including retries and pauses.

        A request that reaches no endpoint is retried up to `retries` times. After as many
        consecutive failures as there may be concurrent requests, each question gets a single
        request.
        """
        config = self._config
        end = time.monotonic() + config.timeout_s
        body = {"model": config.model, "messages": list(messages)} | dict(config.fields)
        body |= {"temperature": config.temperature}
        body |= {"max_tokens": config.max_tokens} if config.max_tokens else {}
        payload = json.dumps(body).encode()
        for attempt in range(config.retries + 1):
            reply, retry_after_s = self._request(payload, end)
            last = attempt == config.retries or self._failures >= config.requests
            if last or reply.failure in ("", REFUSED, LATE):
                break
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1)
            pause = max(pause, retry_after_s)
            if pause >= end - time.monotonic() or self._closing.wait(pause):
                break
        self._failures = self._failures + 1 if reply.failure in (UNREACHABLE, LATE) else 0
        return reply._replace(detail=self._redacted(reply.detail))

    def close(self) -> None:
        """Cancels the requests in flight. No new requests are sent."""
        self._closing.set()
        with self._lock:
            for connection in self._sockets:
                _shut(connection)

    def _request(self, payload: bytes, end: float) -> tuple[Reply, float]:
        """Returns (reply to one request, seconds from its Retry-After header)."""
        late = Reply("", LATE, f"no answer after {self._config.timeout_s:g} s"), 0.0
        seconds = end - time.monotonic()
        if seconds <= 0:
            return late
        try:
            response = self._post(payload, seconds)
        except (OSError, http.client.HTTPException) as error:
            unreachable = Reply("", UNREACHABLE, f"{type(error).__name__}: {error}"), 0.0
            return late if time.monotonic() >= end else unreachable
        if response.status == 200 and len(response.body) <= MOST_BYTES:
            return _completion(response.body), 0.0
        later = response.status in RETRIED or response.status >= 500
        failure = UNREACHABLE if later else REFUSED if response.status >= 300 else NONSENSE
        detail = f"HTTP {response.status}: {_beginning(response.body)}"
        return Reply("", failure, detail), response.pause_s

    def _post(self, payload: bytes, seconds: float) -> _Response:
        """Returns the endpoint's response. The connection is cut after `seconds`, even while data
        still arrives; OSError or HTTPException is raised then.
        """
        secure = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connect_s = min(CONNECT_S, seconds)
        connection = kind(self._url.hostname or "", self._url.port, timeout=connect_s)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        end = time.monotonic() + seconds
        try:
            connection.connect()
            with self._cut_at(connection.sock, end):
                connection.request("POST", self._url.path, payload, headers)
                response = connection.getresponse()
                body = response.read(MOST_BYTES + 1)
            if time.monotonic() >= end or self._closing.is_set():
                raise TimeoutError("the connection was cut")
            return _Response(response.status, body, _seconds(response.headers.get("Retry-After")))
        finally:
            connection.close()

    @contextlib.contextmanager
    def _cut_at(self, connection: socket.socket, end: float) -> Iterator[None]:
        """Shuts the connection down at `end`, or when this endpoint is closed, while the block
        runs.
        """
        left = max(0.001, end - time.monotonic())
        connection.settimeout(left)
        timer = threading.Timer(left, _shut, (connection,))
        timer.daemon = True
        with self._lock:
            self._sockets.add(connection)
        timer.start()
        try:
            if self._closing.is_set():
                raise TimeoutError("the connection was cut")
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._sockets.discard(connection)

    def _redacted(self, detail: str) -> str:
        """Returns a detail on one line, with the key removed, since an endpoint may echo it."""
        hidden = detail.replace(self._key, "(key)") if self._key else detail
        return " ".join(hidden.split())[:MOST_DETAIL]


def _key(variable: str, section: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{section}.key_env = {variable!r}: this environment variable holds no key; set it"
            " before the run starts"
        )
    return key


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # for TLS as well: skip its closing handshake
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _seconds(text: str | None) -> float:
    """Returns Retry-After in seconds; 0 for the header's other form, a date."""
    return float(text) if text and text.isdecimal() and len(text) < 6 else 0.0


def _completion(body: bytes) -> Reply:
    try:
        value = parse_json(body, "the endpoint's answer")
        choice = value["choices"][0]
        message = choice["message"]
        thoughts = (message.get("reasoning_content"), message.get("reasoning"))
        thought = next((x for x in thoughts if x), "")
        thought = thought if isinstance(thought, str) else ""
        text = message["content"]
        if text is None and thought:  # the token limit cut the thought
            text = ""
        if isinstance(text, str):
            whole = choice.get("finish_reason") != "length"
            return Reply(text, thought=thought, tokens=_tokens(value), whole=whole)
        problem = f"its content is a {type(text).__name__}"
    except UntrustedError as error:
        problem = str(error)
    except (LookupError, TypeError, AttributeError):
        problem = "it has no choices[0].message.content"
    return Reply("", NONSENSE, f"{problem}: {_beginning(body)}")


def _tokens(value: dict[str, Any]) -> int:
    usage = value.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) and count > 0 else 0


def _beginning(body: bytes) -> str:
    """Returns a prefix of a body that is longer than the displayed detail, so that a key in it is
    complete and can be removed.
    """
    return body[: 4 * MOST_DETAIL].decode(errors="replace")
