"""Requests whose headers, method or framing are odd: (what, bytes, whether it may be answered)."""

from __future__ import annotations

import gzip
import json
import random

from .wire import HONEST, request

SOUND = json.dumps(HONEST).encode()


Odd = list[tuple[str, bytes, bool]]


def odd_requests(port: int, rng: random.Random) -> Odd:
    """All of them, for a server on `port`."""
    path = "/v1/completions"
    plain = request(path, SOUND, port=port)
    return [
        *_first(port, path, plain),
        *_second(port, path, plain),
        *_third(port, path, plain, rng),
    ]


def _first(port: int, path: str, plain: bytes) -> Odd:
    """Senders and kinds of content."""
    return [
        (
            "text/plain, as a page of another origin sends it",
            request(path, SOUND, {"Content-Type": "text/plain"}, port=port),
            False,
        ),
        (
            "a form",
            request(path, SOUND, {"Content-Type": "application/x-www-form-urlencoded"}, port=port),
            False,
        ),
        (
            "another Origin",
            request(path, SOUND, {"Origin": "http://evil.example"}, port=port),
            False,
        ),
        ("Origin null", request(path, SOUND, {"Origin": "null"}, port=port), False),
        ("another Host", request(path, SOUND, {"Host": "evil.example"}, port=port), False),
        (
            "another Host with our port",
            request(path, SOUND, {"Host": f"evil.example:{port}"}, port=port),
            False,
        ),
        ("localhost", request(path, SOUND, {"Host": f"localhost:{port}"}, port=port), True),
        (
            "a charset",
            request(path, SOUND, {"Content-Type": "application/json; charset=utf-8"}, port=port),
            True,
        ),
        ("no Host", plain.replace(f"Host: 127.0.0.1:{port}\r\n".encode(), b""), False),
        (
            "an authorisation nobody asked for",
            request(path, SOUND, {"Authorization": "Bearer x"}, port=port),
            True,
        ),
        ("a header of 100 kB", request(path, SOUND, {"X-Long": "a" * 100_000}, port=port), True),
        (
            "3,000 headers",
            request(path, SOUND, {f"X-{i}": "a" for i in range(3000)}, port=port),
            True,
        ),
        (
            "a header without a colon",
            plain.replace(b"Connection: close", b"Connection close"),
            False,
        ),
    ]


def _second(port: int, path: str, plain: bytes) -> Odd:
    """Headers and lengths."""
    return [
        ("a NUL in a header", request(path, SOUND, {"X-Nul": "a\0b"}, port=port), False),
        ("a header that is not ASCII", request(path, SOUND, {"X-Odd": "é\udcff"}, port=port), True),
        (
            "two lengths",
            plain.replace(b"Content-Length", b"Content-Length: 5\r\nContent-Length"),
            False,
        ),
        ("a negative length", request(path, SOUND, {"Content-Length": "-1"}, port=port), False),
        (
            "a length that is no number",
            request(path, SOUND, {"Content-Length": "ten"}, port=port),
            False,
        ),
        (
            "a length that is far too long, over the limit",
            request(path, SOUND, {"Content-Length": str(10**12)}, port=port),
            False,
        ),
        ("a body of 2 MB", request(path, b" " * 2_000_000 + SOUND, port=port), False),
        (
            "a compressed body",
            request(path, gzip.compress(SOUND), {"Content-Encoding": "gzip"}, port=port),
            False,
        ),
        (
            "chunks of rubbish",
            plain.replace(f"Content-Length: {len(SOUND)}".encode(), b"Transfer-Encoding: chunked"),
            False,
        ),
        ("an unknown method", request(path, SOUND, method="BREW", port=port), False),
        ("GET", request(path, b"", method="GET", port=port), False),
        (
            "OPTIONS of another origin",
            request(
                path,
                b"",
                {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"},
                "OPTIONS",
                port,
            ),
            False,
        ),
        ("an unknown path", request("/v1/nothing", SOUND, port=port), False),
    ]


def _third(port: int, path: str, plain: bytes, rng: random.Random) -> Odd:
    """Methods, paths, versions, and bytes that are no HTTP."""
    return [
        (
            "a path out of the folder",
            request("/../../etc/passwd", b"", method="GET", port=port),
            False,
        ),
        ("a path of 60 kB", request("/" + "a" * 60_000, b"", method="GET", port=port), False),
        ("a path with odd escapes", request("/%ff%00%2e%2e", b"", method="GET", port=port), False),
        ("the models", request("/v1/models", b"", method="GET", port=port), True),
        ("health", request("/health", b"", method="GET", port=port), True),
        ("metrics", request("/metrics", b"", method="GET", port=port), True),
        ("HTTP/1.0", plain.replace(b"HTTP/1.1", b"HTTP/1.0", 1), True),
        ("HTTP/9.9", plain.replace(b"HTTP/1.1", b"HTTP/9.9", 1), True),
        ("rubbish", bytes(rng.randrange(256) for _ in range(2000)) + b"\r\n\r\n", False),
        ("the hello of TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300), False),
        (
            "an upgrade",
            request(
                "/v1/completions",
                b"",
                {
                    "Connection": "Upgrade",
                    "Upgrade": "websocket",
                    "Sec-WebSocket-Key": "x",
                    "Sec-WebSocket-Version": "13",
                },
                "GET",
                port,
            ),
            False,
        ),
        ("100-continue", request(path, SOUND, {"Expect": "100-continue"}, port=port), True),
        ("a line end alone", b"\r\n\r\n" + plain, True),
    ]
