"""A stand-in for a judge: an HTTP server in a thread, whose answers the test decides."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from compass_jax.config import JudgeConfig


def said(text: Any) -> dict[str, Any]:
    """Returns a chat completion in OpenAI's form."""
    message = {"role": "assistant", "content": text}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}


def quoted(content: str, name: str) -> str:
    """Returns one of the texts that `rewards/verifiers/judge.py:messages` quotes."""
    block = content.split(f"{name}:\n", 1)[1].split("\n\n", 1)[0]
    return "\n".join(line.removeprefix("> ") for line in block.splitlines())


class Behaviour:
    """The answers of a server by request number (from 0). A string is the text of a completion,
    bytes are the raw body, a pair is (status, text), and a float is seconds of silence before
    "Tie".
    """

    def __init__(self, answer: Callable[[int, dict[str, Any]], Any]):
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = self._now = 0
        self._lock = threading.Lock()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """Answers one request."""
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.keys.append(request.headers.get("Authorization"))
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            answer = self.answer(number, body)
            if isinstance(answer, float):
                time.sleep(answer)
                answer = "Tie"
        finally:
            with self._lock:
                # This must precede the response, after which the client sends its next request.
                self._now -= 1
        self._send(request, answer)

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, answer: Any) -> None:
        status = 200
        if isinstance(answer, tuple):
            status, answer = answer
        data = answer if isinstance(answer, bytes) else json.dumps(said(answer)).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)


@contextlib.contextmanager
def served(answer: Callable[[int, dict[str, Any]], Any]) -> Iterator[tuple[str, Behaviour]]:
    """Runs a server and yields (address, its Behaviour, which records the requests)."""
    behaviour = Behaviour(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with contextlib.suppress(OSError):
                behaviour.handle(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", behaviour
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def settings(endpoint: str, **changed: Any) -> JudgeConfig:
    """Returns the configuration of a judge at an address, with limits that suit a test."""
    return JudgeConfig(**{"endpoint": endpoint, "model": "judge", "timeout_s": 5.0, **changed})
