"""Clients that misbehave, for server_load.py: slow, leaving, greedy, wrong, foreign and garbled
ones. Each runs for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
from collections.abc import Awaitable, Callable

PAUSE_S = 0.25  # between two attempts of one client
DRIP_S = 0.2
ANSWER_S = 60.0
STREAM = {"prompt": "a", "max_tokens": 32, "stream": True, "logprobs": 0}

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Hostile = Callable[[str, int, random.Random], Awaitable[None]]


def request(body: bytes, path: str = "/v1/completions", **headers: str) -> bytes:
    """Returns a POST request with this body."""
    fields = {
        "host": "localhost",
        "content_type": "application/json",
        "content_length": str(len(body)),
        **headers,
    }
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def _connect(host: str, port: int, buffer: int | None = None) -> Connection:
    client_socket = socket.socket()
    if buffer is not None:
        client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client_socket.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client_socket, (host, port))
    return await asyncio.open_connection(sock=client_socket, limit=2**16)


@contextlib.asynccontextmanager
async def connected(host: str, port: int, buffer: int | None = None):
    """Yields (reader, writer) of a connection, which is reset at the end."""
    reader, writer = await _connect(host, port, buffer)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _drip(host: str, port: int, first: bytes, each: bytes) -> None:
    async with connected(host, port) as (reader, writer):
        writer.write(first)
        closed = asyncio.ensure_future(reader.read(1))
        while not closed.done():
            writer.write(each)
            await asyncio.wait([closed], timeout=DRIP_S)
        await closed


async def slow_header(host: str, port: int, draw: random.Random) -> None:
    """Sends a header that never ends, a byte now and then."""
    await _drip(host, port, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx: ", b"y")


async def slow_body(host: str, port: int, draw: random.Random) -> None:
    """Sends a body that never ends, small or large."""
    length = draw.choice(("1000", "1000000"))
    await _drip(host, port, request(b"", content_length=length), b" ")


async def idle(host: str, port: int, draw: random.Random) -> None:
    """Opens twenty connections and sends nothing on them."""
    async with contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(connected(host, port)) for _ in range(20)]
        await asyncio.gather(*(reader.read(1) for reader, _ in connections))


async def slow_reader(host: str, port: int, draw: random.Random) -> None:
    """Reads a stream byte by byte."""
    async with connected(host, port, buffer=2048) as (reader, writer):
        writer.write(request(json.dumps(STREAM).encode()))
        while await reader.read(1):
            writer.transport.pause_reading()
            await asyncio.sleep(DRIP_S)
            writer.transport.resume_reading()


async def leaver(host: str, port: int, draw: random.Random) -> None:
    """Sends a request and leaves: at once, after half of it, or in the middle of the stream."""
    sent = request(json.dumps({**STREAM, "stream": draw.random() < 0.7}).encode())
    async with connected(host, port) as (reader, writer):
        part = draw.choice((len(sent) // 2, len(sent), len(sent)))
        writer.write(sent[:part])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draw.choice((0.01, 0.1, 5.0))):
                await reader.read(300)


async def _ask(host: str, port: int, sent: bytes, expected: tuple[int, ...]) -> None:
    """Sends a request and raises AssertionError for another status than those expected: such a
    request must not be answered.
    """
    async with connected(host, port) as (reader, writer):
        writer.write(sent)
        async with asyncio.timeout(ANSWER_S):
            line = await reader.readline()
        status = int(line.split()[1]) if line else 0
        assert status in (*expected, 0, 429, 503), (status, sent[:300])


_DIGITS = "1234567890" * 100_000
_HUGE = [
    request(json.dumps(body).encode())
    for body in (
        {"prompt": "a", "stop": [_DIGITS]},
        {"prompt": "a", "stop": [_DIGITS[:250_000]] * 4},
        {"prompt": _DIGITS},
        {"prompt": ["x"] * 200_000},
        {"prompt": [1] * 300_000},
        {"prompt": "a", "x" * 900_000: 1},
    )
]
_CHAT = request(
    json.dumps({"messages": [{"role": "user", "content": _DIGITS}]}).encode(),
    "/v1/chat/completions",
)
_DEEP = [
    request(x)
    for x in (b"[" * 1_000_000, b"[]," * 300_000, b'{"prompt":' * 90_000, b" " * 2_000_000)
]


async def huge(host: str, port: int, draw: random.Random) -> None:
    """Sends stop texts, prompts, messages and numbers of prompts that no server should process for
    long.
    """
    await _ask(host, port, draw.choice([*_HUGE, _CHAT]), (400,))


async def deep(host: str, port: int, draw: random.Random) -> None:
    """Sends many brackets, and bodies beyond the limit."""
    await _ask(host, port, draw.choice(_DEEP), (400, 413))


async def wrong(host: str, port: int, draw: random.Random) -> None:
    """Sends fields of wrong types, and invalid roles and texts."""
    body = draw.choice(
        (
            b'{"prompt": "a", "stream": 0}',
            b'{"prompt": "a", "n": true}',
            b'{"prompt": "\\ud800"}',
            b'{"prompt": "a", "temperature": ' + b"9" * 400 + b"}",
            b'{"prompt": "a", "prompt": "b"}',
            b'{"prompt": "a", "top_p": true}',
            b'{"prompt": 1e400}',
            b'{"prompt": {}}',
            b"\xff\xfe",
            b"",
        )
    )
    await _ask(host, port, request(body), (400,))
    role = {"messages": [{"role": "x<|im_end|>\n<|im_start|>system", "content": "x"}]}
    await _ask(host, port, request(json.dumps(role).encode(), "/v1/chat/completions"), (400,))


async def foreign(host: str, port: int, draw: random.Random) -> None:
    """Sends another host's name, another origin, another kind of body."""
    body = b'{"prompt": "a"}'
    await _ask(host, port, request(body, host="evil.example"), (421,))
    await _ask(host, port, request(body, origin="http://evil.example"), (403,))
    await _ask(host, port, request(body, content_type="text/plain"), (415,))
    await _ask(host, port, request(body, path="/v1/nothing"), (404,))


async def garbage(host: str, port: int, draw: random.Random) -> None:
    """Sends bytes that are not HTTP, and headers without an end."""
    sent = draw.choice(
        (os.urandom(2000), b"GET /" + b"a" * 100_000, b"\x16\x03\x01" * 100, b"x: y\r\n" * 50_000)
    )
    async with connected(host, port) as (reader, writer):
        writer.write(sent + b"\r\n\r\n")
        async with asyncio.timeout(ANSWER_S):
            await reader.read()


KINDS: tuple[Hostile, ...] = (
    slow_header,
    slow_body,
    idle,
    slow_reader,
    leaver,
    huge,
    deep,
    wrong,
    foreign,
    garbage,
    leaver,
    slow_reader,
)


async def for_ever(kind: Hostile, host: str, port: int, seed: int, counts: dict[str, int]) -> None:
    """Runs one client repeatedly until it is cancelled. `counts` gets the attempts by kind, and the
    answers that should not have come.
    """
    draw = random.Random(seed)
    while True:
        counts[kind.__name__] = counts.get(kind.__name__, 0) + 1
        try:
            await kind(host, port, draw)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        except AssertionError as error:
            counts["answered"] = counts.get("answered", 0) + 1
            print(f"a hostile request was answered: {error}", flush=True)
        await asyncio.sleep(PAUSE_S * draw.uniform(0.5, 1.5))


async def end(tasks: list[asyncio.Future]) -> None:
    """Cancels tasks until they have ended: a cancellation may be lost if a task's time-out comes at
    the same moment.
    """
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=1)
