"""Damaged requests and misused connections against the HTTP server: each is refused with a message
or answered, and an honest client then gets its text.
"""

import contextlib
import json
import logging
import socket
import struct

import pytest
from campaign_files import damage_bytes, damage_json
from served import ask, saved, served

from benchmarks.hostile_clients import request

TIMEOUT_S = 10.0
PATHS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}
COMPLETION = {"prompt": "What is 3 + 4?", "max_tokens": 6, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 6}
SENT = request(json.dumps(COMPLETION).encode())
STREAMED = request(json.dumps({**COMPLETION, "stream": True}).encode())
# The bytes that a client sends, and how it then treats the connection.
CONNECTIONS = {
    "nothing": (b"", "hold"),
    "half a line": (SENT[:9], "hold"),
    "half a header": (SENT[:60], "hold"),
    "half a body": (SENT[:-10], "hold"),
    "half a body, then no more": (SENT[:-10], "shut down"),
    "a request whose client leaves": (SENT, "close"),
    "a request whose client resets": (SENT, "reset"),
    "a stream that nobody reads": (STREAMED, "hold"),
    "a stream whose client leaves": (STREAMED, "close"),
    "two requests at once": (SENT + SENT, "hold"),
    "random bytes": (bytes(range(256)) * 8 + b"\r\n\r\n", "hold"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Yields the configuration of a running server and the honest client's text."""
    folder = saved(tmp_path_factory.mktemp("serve") / "hf")
    options = {"slots": 2, "prompt_tokens": 64, "max_new_tokens": 16, "max_waiting": 64}
    with served(folder, **options) as config:
        yield config, honest_text(config)


def honest_text(config):
    """Returns the greedy completion that an honest client gets."""
    status, _, body = ask(config, "POST", PATHS["prompt"], json.dumps(COMPLETION))
    assert status == 200, body
    return json.loads(body)["choices"][0]["text"]


def test_a_damaged_body_is_refused_with_a_message_or_answered(draw, server, caplog):
    config, text = server
    base = draw.choice([COMPLETION, CHAT])
    valid_body = json.dumps(base).encode()
    body = damage_json(base, draw) if draw.random() < 0.7 else damage_bytes(valid_body, draw)
    path = PATHS["prompt" if "prompt" in base else "messages"]
    with caplog.at_level(logging.ERROR):
        status, _, answer = ask(config, "POST", path, body)
        assert status == 200 or 400 <= status < 500, (body[:200], answer[:500])
        if status != 200:
            assert json.loads(answer)["error"]["message"], body[:200]
        else:
            json.loads(body)  # Only JSON is answered.
        assert honest_text(config) == text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("kind", CONNECTIONS)
def test_misused_connections_keep_nobody_out(kind, server, caplog):
    config, text = server
    data, then = CONNECTIONS[kind]
    with contextlib.ExitStack() as links, caplog.at_level(logging.ERROR):
        for _ in range(20):
            link = socket.create_connection(("127.0.0.1", config.port), TIMEOUT_S)
            links.callback(link.close)
            with contextlib.suppress(OSError):
                link.sendall(data)
                if then == "reset":
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if then in ("reset", "close"):
                    link.close()
                elif then == "shut down":
                    link.shutdown(socket.SHUT_WR)
        assert honest_text(config) == text
    assert "Traceback" not in caplog.text
