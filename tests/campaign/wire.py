"""HTTP by hand, for requests that no client would send; and the server that they are sent to, one
for each process of the campaign.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import fork
from .world import World

PATIENCE_S = 10.0
READY_S = 120.0
HONEST = {"prompt": "What is 3 + 4?", "max_tokens": 6, "temperature": 0}


@dataclass(frozen=True)
class Reply:
    """What came back: the status (0: nothing, the connection was closed; -1: nothing in time),
    the body, seconds.
    """

    status: int
    body: bytes
    seconds: float

    def value(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def request(
    path: str,
    body: bytes,
    headers: dict[str, str] | None = None,
    method: str = "POST",
    port: int = 0,
) -> bytes:
    """The bytes of a request."""
    fields = {
        "Host": f"127.0.0.1:{port}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    fields |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value is not None)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("utf-8", "surrogateescape") + body


def exchange(port: int, data: bytes, patience_s: float = PATIENCE_S) -> Reply:
    """Sends bytes, and reads one answer to its end."""
    began = time.monotonic()
    received = b""
    try:
        with socket.create_connection(("127.0.0.1", port), patience_s) as link:
            link.settimeout(patience_s)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                link.sendall(data)
            while time.monotonic() - began < patience_s:
                piece = link.recv(1 << 16)
                received += piece
                if not piece or _whole(received):
                    break
            else:
                return Reply(-1, received, time.monotonic() - began)
    except TimeoutError:
        return Reply(-1, received, time.monotonic() - began)
    except OSError:
        if not received:
            return Reply(0, b"", time.monotonic() - began)
    return parse(received, time.monotonic() - began)


def _whole(received: bytes) -> bool:
    head, found, body = received.partition(b"\r\n\r\n")
    if not found:
        return False
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    if b"content-length" in fields:
        return len(body) >= int(fields[b"content-length"])
    return b"chunked" in fields.get(b"transfer-encoding", b"") and body.endswith(b"0\r\n\r\n")


def parse(received: bytes, seconds: float) -> Reply:
    """The first answer in what was received."""
    head, _, body = received.partition(b"\r\n\r\n")
    words = head.split(b" ")
    if not head.startswith(b"HTTP/1.") or len(words) < 2 or not words[1][:3].isdigit():
        return Reply(0, received, seconds)
    if b"transfer-encoding: chunked" in head.lower():
        whole, rest = b"", body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            count = int(size or b"0", 16)
            if not count:
                break
            whole, rest = whole + rest[:count], rest[count + 2 :]
        body = whole
    return Reply(int(words[1][:3]), body, seconds)


class Server:
    """`compass serve --openai` of the tiny model, in a child."""

    def __init__(self, world: World):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.said = world.folder / "said" / f"server.{os.getpid()}"
        sizes = [
            "--slots",
            "2",
            "--prompt-tokens",
            "64",
            "--max-new-tokens",
            "16",
            "--max-waiting",
            "8",
        ]
        limits = fork.Limits(seconds=1e9, cpu_s=100_000)
        self.child = fork.start(
            ["serve", "hf", "--openai", "--port", str(self.port), *sizes],
            world.files,
            self.said,
            limits,
        )
        limit = time.monotonic() + READY_S
        while self.post(HONEST).status != 200:
            assert self.child.poll() is None and time.monotonic() < limit, (
                f"no server: {self.errors()[-2000:]}"
            )
            time.sleep(0.1)
        self.post(HONEST | {"n": 2})
        self.text = self.greedy(16)

    def post(
        self, body: Any, path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> Reply:
        """Sends a body as JSON."""
        return exchange(
            self.port, request(path, json.dumps(body).encode(), headers, port=self.port)
        )

    def greedy(self, tokens: int) -> str | None:
        """The honest client's text; None where there is none in time. Where the server says that
        it is full (429), the client asks again, as OpenAI's does.
        """
        limit = time.monotonic() + PATIENCE_S
        while (reply := self.post(HONEST | {"max_tokens": tokens})).status == 429:
            if time.monotonic() > limit:
                return None
            time.sleep(0.05)
        value = reply.value() if reply.status == 200 else None
        return value["choices"][0]["text"] if value else None

    def errors(self) -> str:
        """What the server has written to its standard error so far."""
        file = Path(self.said) / "err"
        return file.read_text(errors="replace") if file.exists() else ""

    def close(self) -> None:
        """Ends it."""
        self.child.end()
