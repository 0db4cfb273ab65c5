"""One question to an OpenAI-compatible endpoint, which may be down, slow, or no such endpoint.

Requests are sent by the trainer's process: verifier workers have no network. What comes back is not
trusted: it has a limit of time and of bytes, and is JSON of the one form, or a failure with a name.
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

CONNECT_S = 10.0  # longest wait for a connection
MOST_BYTES = 8 * 2**20  # of an answer
MOST_DETAIL = 300  # characters
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
AGAIN = (408, 409, 425, 429)  # and those from 500 on: it may answer later

UNREACHABLE, LATE, NONSENSE, REFUSED = "unreachable", "late", "nonsense", "refused"


class Reply(NamedTuple):
    """A text, or why there is none: UNREACHABLE, LATE, NONSENSE or REFUSED, and its detail."""

    text: str
    failure: str = ""
    detail: str = ""
    thought: str = ""  # what it thought before, where the endpoint says that apart
    tokens: int = 0  # of thought and text; 0: the endpoint did not say
    whole: bool = True  # it was not cut at the most tokens


class _Heard(NamedTuple):
    status: int
    body: bytes
    pause_s: float  # that the endpoint asks for


class Endpoint:
    """Asks the judge of `config`. Thread-safe; `requests` threads may ask at once.

    Raises ConfigError where the variable that `key_env` names holds no key; `key` is the section of
    the settings.
    """

    def __init__(self, config: JudgeConfig, key: str = "rewards.judge"):
        self._config = config
        self._at = urlsplit(config.endpoint.rstrip("/") + "/chat/completions")
        self._key = _key(config.key_env, key)
        self._closing = threading.Event()
        self._failed = 0  # in a row that found nobody
        self._sockets: set[Any] = set()
        self._lock = threading.Lock()

    def __call__(self, messages: Sequence[dict[str, str]]) -> Reply:
        """What the judge says, within `timeout_s`, tries and pauses included. After a request that
        found nobody comes another, `retries` times; while as many in a row as may be under way
        found nobody, one try is all that each gets.
        """
        config = self._config
        end = time.monotonic() + config.timeout_s
        body = {"model": config.model, "messages": list(messages)} | dict(config.fields)
        body |= {"temperature": config.temperature}
        body |= {"max_tokens": config.max_tokens} if config.max_tokens else {}
        payload = json.dumps(body).encode()
        for attempt in range(config.retries + 1):
            reply, asked_s = self._once(payload, end)
            last = attempt == config.retries or self._failed >= config.requests
            if last or reply.failure in ("", REFUSED, LATE):
                break
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1)
            pause = max(pause, asked_s)
            if pause >= end - time.monotonic() or self._closing.wait(pause):
                break
        self._failed = self._failed + 1 if reply.failure in (UNREACHABLE, LATE) else 0
        return reply._replace(detail=self._shown(reply.detail))

    def close(self) -> None:
        """Cuts the requests that are under way; there will be no others."""
        self._closing.set()
        with self._lock:
            for one in self._sockets:
                _shut(one)

    def _once(self, payload: bytes, end: float) -> tuple[Reply, float]:
        """(the reply to one request, seconds that the endpoint asks to wait)."""
        seconds = end - time.monotonic()
        if seconds <= 0:
            return self._late(), 0.0
        try:
            heard = self._post(payload, seconds)
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= end:
                return self._late(), 0.0
            return Reply("", UNREACHABLE, f"{type(error).__name__}: {error}"), 0.0
        if heard.status == 200 and len(heard.body) <= MOST_BYTES:
            return _completion(heard.body), 0.0
        said = _beginning(heard.body)
        later = heard.status in AGAIN or heard.status >= 500
        failure = UNREACHABLE if later else REFUSED if heard.status >= 300 else NONSENSE
        return Reply("", failure, f"HTTP {heard.status}: {said}"), heard.pause_s

    def _late(self) -> Reply:
        return Reply("", LATE, f"no answer after {self._config.timeout_s:g} s")

    def _post(self, payload: bytes, seconds: float) -> _Heard:
        """The endpoint's answer. However slowly it trickles, the connection is cut after
        `seconds`; OSError or HTTPException then.
        """
        secure = self._at.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        wait = min(CONNECT_S, seconds)
        connection = kind(self._at.hostname or "", self._at.port, timeout=wait)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        end = time.monotonic() + seconds
        try:
            connection.connect()
            with self._cut_at(connection.sock, end):
                connection.request("POST", self._at.path, payload, headers)
                response = connection.getresponse()
                body = response.read(MOST_BYTES + 1)
            if time.monotonic() >= end or self._closing.is_set():
                raise TimeoutError("the connection was cut")
            return _Heard(response.status, body, _seconds(response.headers.get("Retry-After")))
        finally:
            connection.close()

    @contextlib.contextmanager
    def _cut_at(self, connection: socket.socket, end: float) -> Iterator[None]:
        """Meanwhile the connection is shut at `end`, or when this endpoint is closed."""
        connection.settimeout(max(0.001, end - time.monotonic()))
        timer = threading.Timer(max(0.0, end - time.monotonic()), _shut, (connection,))
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

    def _shown(self, detail: str) -> str:
        """A detail without the key, which an endpoint may repeat, on one line."""
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
        # of TLS too: no goodbye to wait for
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _seconds(text: str | None) -> float:
    """Retry-After in seconds; its other form, a date, is left to our own pauses."""
    return float(text) if text and text.isdecimal() and len(text) < 6 else 0.0


def _completion(body: bytes) -> Reply:
    try:
        value = parse_json(body, "the endpoint's answer")
        choice = value["choices"][0]
        text, thought = choice["message"]["content"], _thought(choice["message"])
        if text is None and thought:  # it was cut while it thought
            text = ""
        if isinstance(text, str):
            whole = choice.get("finish_reason") != "length"
            return Reply(text, thought=thought, tokens=_tokens(value), whole=whole)
        said = f"its content is a {type(text).__name__}"
    except UntrustedError as error:
        said = str(error)
    except (LookupError, TypeError, AttributeError):
        said = "it has no choices[0].message.content"
    return Reply("", NONSENSE, f"{said}: {_beginning(body)}")


def _thought(message: dict[str, Any]) -> str:
    """The chain of thought, under either name that servers give it."""
    found = message.get("reasoning_content") or message.get("reasoning")
    return found if isinstance(found, str) else ""


def _tokens(value: dict[str, Any]) -> int:
    usage = value.get("usage")
    found = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return found if isinstance(found, int) and found > 0 else 0


def _beginning(body: bytes) -> str:
    """More of a body than is shown, so that a key in it is whole where it is hidden."""
    return body[: 4 * MOST_DETAIL].decode(errors="replace")
