"""Transport of questions to a judge: an OpenAI-compatible endpoint, which may be down or slow or
return malformed responses, or one batch for an engine in this process.

Requests are sent by the trainer's process, because verifier workers have no network. A response has
limits of time and size; one that is not the expected JSON is a named failure.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from compass_jax.base.aliases import Json, JsonMapping
from compass_jax.base.chat.calls import MalformedCall, read_call, write_call
from compass_jax.base.untrusted import UntrustedError, parse_json
from compass_jax.config import ConfigError, EngineJudgeConfig, JudgeConfig

CONNECT_S = 10.0  # timeout of connecting
MOST_BYTES = 8 * 2**20  # maximum size of a response
MOST_DETAIL = 300  # characters
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
RETRIED = (408, 409, 425, 429)  # HTTP statuses that are retried, as are all from 500
REJECTED = (400, 413, 422)  # HTTP statuses that refuse the content of a request

UNREACHABLE, LATE, NONSENSE, REFUSED = "unreachable", "late", "nonsense", "refused"


class Reply(NamedTuple):
    """A text, or the failure (UNREACHABLE, LATE, NONSENSE or REFUSED) with its detail."""

    text: str
    failure: str = ""
    detail: str = ""
    thought: str = ""  # chain of thought, if the endpoint returns it separately
    tokens: int = 0  # tokens of thought and text; 0 if the endpoint reports none
    complete: bool = True  # whether the answer ended before the token limit
    # largest entropy of a token in its last line; None: the judge's tokens are not known
    entropy_nats: float | None = None
    status: int = 0  # HTTP status of a failed request, if there was a response

    @property
    def rejects_prompt(self) -> bool:
        """Whether this prompt was refused, such as one that is too long, and others may not be."""
        return self.failure == REFUSED and self.status in REJECTED


Messages = Sequence[dict[str, str]]
Generate = Callable[[Sequence[Messages]], Sequence[Reply]]


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
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __call__(self, messages: Messages, tools: Sequence[JsonMapping] = ()) -> Reply:
        """Returns the answer within `timeout_s`, including retries and pauses. `tools` are offered
        to the model; its calls are in the text, between <tool_call> tags.

        A request that reaches no endpoint is retried up to `retries` times. After as many
        consecutive failures as there may be concurrent requests, each question gets a single
        request.
        """
        config = self._config
        end = time.monotonic() + config.timeout_s
        body = {"model": config.model, "messages": list(messages)} | dict(config.fields)
        body |= {"temperature": config.temperature}
        body |= {"max_tokens": config.max_tokens} if config.max_tokens else {}
        body |= {"tools": [_tool(one) for one in tools]} if tools else {}
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
        # on one line, without the key, which an endpoint may echo
        detail = reply.detail.replace(self._key, "(key)") if self._key else reply.detail
        return reply._replace(detail=" ".join(detail.split())[:MOST_DETAIL])

    def close(self) -> None:
        """Cancels the requests in flight. No new requests are sent."""
        self._closing.set()
        with self._lock:
            for connection in self._sockets:
                _shut(connection)

    def _request(self, payload: bytes, end: float) -> tuple[Reply, float]:
        """Returns (reply to one request, seconds from its Retry-After header)."""
        try:
            status, body, after = self._post(payload, end)
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= end:
                return Reply("", LATE, f"no answer after {self._config.timeout_s:g} s"), 0.0
            return Reply("", UNREACHABLE, f"{type(error).__name__}: {error}"), 0.0
        if status == 200 and len(body) <= MOST_BYTES:
            return _completion(body), 0.0
        later = status in RETRIED or status >= 500
        failure = UNREACHABLE if later else REFUSED if status >= 300 else NONSENSE
        # Retry-After may also be a date
        pause = float(after) if after and after.isdecimal() and len(after) < 6 else 0.0
        return Reply("", failure, f"HTTP {status}: {_beginning(body)}", status=status), pause

    def _post(self, payload: bytes, end: float) -> tuple[int, bytes, str | None]:
        """Returns status, body and Retry-After of the endpoint's response. The connection is cut at
        `end`, even while data still arrives; OSError or HTTPException is raised then.
        """
        secure = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        seconds = max(0.001, end - time.monotonic())
        connection = kind(self._url.hostname or "", self._url.port, timeout=min(CONNECT_S, seconds))
        try:
            connection.connect()
            with self._cut_at(connection.sock, end):
                connection.request("POST", self._url.path, payload, headers)
                response = connection.getresponse()
                body = response.read(MOST_BYTES + 1)
            if time.monotonic() >= end or self._closing.is_set():
                raise TimeoutError("the connection was cut")
            return response.status, body, response.headers.get("Retry-After")
        finally:
            connection.close()

    @contextlib.contextmanager
    def _cut_at(self, connection: socket.socket, end: float) -> Iterator[None]:
        """Shuts the connection down at `end` or on `close()`, while the block runs."""
        left = max(0.001, end - time.monotonic())
        # The timeout of a socket applies to each read; the timer limits the whole answer.
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


class Pooled:
    """Sends questions to an endpoint, up to `requests` at a time. `ask` replaces the endpoint;
    `key` is that of Endpoint. `name` is the judge's identity: judges with the same name give the
    same answers.
    """

    unsure_nats = 0.0  # the entropies of an endpoint's verdicts are not known

    def __init__(
        self,
        config: JudgeConfig,
        ask: Callable[..., Reply] | None = None,
        key: str = "rewards.judge",
    ):
        self._endpoint = Endpoint(config, key)
        self._ask = ask or self._endpoint
        self._pool = ThreadPoolExecutor(config.requests, "judge")
        identity = [config.model, config.max_tokens, config.temperature, config.fields]
        self.name = json.dumps(identity)

    def submit(self, messages: Messages, tools: Sequence[JsonMapping] = ()) -> Future[Reply]:
        """Queues a question for the thread pool; `tools` are those of Endpoint."""
        ask = partial(self._ask, tools=tools) if tools else self._ask
        return self._pool.submit(ask, messages)

    def run(self) -> None:
        """Does nothing, because the threads are running already."""

    def close(self) -> None:
        """Cancels the requests in flight."""
        self._endpoint.close()
        self._pool.shutdown(wait=True, cancel_futures=True)


class Batched:
    """Sends all questions at once to an engine in this process, in the thread that waits for the
    answers.

    The owner of the engine sets `generate`. If the policy's own weights judge, it also sets
    `version`, their version, since verdicts of different versions differ.
    """

    def __init__(self, config: EngineJudgeConfig):
        self._config = config
        self._questions: list[tuple[Messages, Future[Reply]]] = []
        self._lock = threading.Lock()
        self.generate: Generate | None = None
        self.version = 0

    @property
    def name(self) -> str:
        """The weights, their version, the sampling parameters and the limit of an unsure
        verdict.
        """
        config = self._config
        settings = [config.weights, self.version, config.max_tokens, config.temperature]
        return json.dumps(settings + ([config.unsure_nats] if config.unsure_nats else []))

    @property
    def unsure_nats(self) -> float:
        """The entropy from which on a verdict is a Tie; 0: never."""
        return self._config.unsure_nats

    def submit(self, messages: Messages) -> Future[Reply]:
        """Stores a question until `run`."""
        reply: Future[Reply] = Future()
        with self._lock:
            self._questions.append((messages, reply))
        return reply

    def run(self) -> None:
        """Answers all stored questions. Raises ConfigError if no engine is set."""
        with self._lock:
            questions, self._questions = self._questions, []
        if not questions:
            return
        if self.generate is None:
            raise ConfigError(
                "rewards.judge: a judge in an engine of our own judges in `compass train` alone;"
                " serve it (compass serve) and name its endpoint in JudgeConfig"
            )
        replies = self.generate([messages for messages, _ in questions])
        for (_, future), reply in zip(questions, replies, strict=True):
            future.set_result(reply)

    def close(self) -> None:
        """Drops the unanswered questions."""
        self._questions = []


Asker = Pooled | Batched  # sends questions to a judge


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


def _completion(body: bytes) -> Reply:
    try:
        value = parse_json(body, "the endpoint's answer")
        choice = value["choices"][0]
        message, usage = choice["message"], value.get("usage")
        thoughts = (message.get("reasoning_content"), message.get("reasoning"))
        thought = next((x for x in thoughts if x and isinstance(x, str)), "")
        text = message.get("content", "") if message.get("tool_calls") else message["content"]
        if text is None and thought:  # the token limit cut the thought
            text = ""
        if calls := message.get("tool_calls"):
            text = "\n".join([*filter(None, [text]), *map(_call, calls)])
        if isinstance(text, str):
            tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
            tokens = tokens if isinstance(tokens, int) and tokens > 0 else 0
            complete = choice.get("finish_reason") != "length"
            return Reply(text, thought=thought, tokens=tokens, complete=complete)
        problem = f"its content is a {type(text).__name__}"
    except (UntrustedError, MalformedCall) as error:
        problem = str(error)
    except (LookupError, TypeError, AttributeError):
        problem = "it has no choices[0].message.content"
    return Reply("", NONSENSE, f"{problem}: {_beginning(body)}")


def _tool(tool: JsonMapping) -> JsonMapping:
    """Returns a tool's description in OpenAI's format."""
    return tool if "function" in tool else {"type": "function", "function": tool}


def _call(value: Json) -> str:
    """Returns a call's text, as models of Hermes' format write it."""
    return write_call(read_call(value))


def _beginning(body: bytes) -> str:
    """Returns a prefix of a body, long enough that a key in its shown part is complete."""
    return body[: 4 * MOST_DETAIL].decode(errors="replace")
