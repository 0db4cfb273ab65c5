"""An API server over a batcher without a model, whose answers are set by the test."""

import contextlib
import json
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rollout.online import Chunk
from compass_jax.rollout.serving.limits import Limits, bind
from compass_jax.rollout.serving.openai_api import make_app
from compass_jax.rollout.serving.openai_requests import Served
from compass_jax.rollout.serving.server import http_server

TINY = Path(__file__).parents[3] / "configs" / "tiny_tokenizer"
TOKENIZER = Tokenizer.load(TINY)


class Scripted:
    """A batcher that sends `text` to every request, and then `finish`."""

    def __init__(self, text="ok", finish="stop", submitted=lambda groups: None):
        self.text, self.finish, self.submitted = text, finish, submitted
        self.error = None
        self.active = self.waiting = 0
        self.engine = SimpleNamespace(config=SimpleNamespace(slots=2))
        self.prompts, self.cancelled = [], []

    def submit(self, *groups):
        self.submitted(groups)
        for request in (x for group in groups for x in group):
            self.prompts.append(TOKENIZER.decode(request.tokens, special=True))
            ids = TOKENIZER.encode(self.text)
            for start in range(0, len(ids), 4):
                request.deliver(Chunk(ids[start : start + 4], ""))
            if self.finish:
                request.deliver(Chunk([], self.finish))

    def cancel(self, requests):
        self.cancelled += requests


def offered(tokenizer=TOKENIZER, prompt_tokens=2048, **options):
    """Returns the model, tokenizer and limits that a server offers."""
    return Served("tiny", tokenizer, 384, prompt_tokens, 64, **options)


@contextlib.contextmanager
def running(batcher=None, key=None, hosts=(), served=None, **limits):
    """Runs a server in the context, and yields its port."""
    server_limits = Limits(**{"stop_s": 0.2, **limits})
    app = make_app(served or offered(), batcher or Scripted(), server_limits, hosts, key)
    with bind("127.0.0.1", 0) as listening:
        server = http_server(app, server_limits)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            hang_up()
            server.should_exit = True
            thread.join(30)
        assert not thread.is_alive()


OPENED = []  # open connections, which `hang_up` closes


def hang_up():
    """Closes every connection."""
    while OPENED:
        OPENED.pop().close()


def connect(port, *pieces):
    """Returns a connection on which these bytes were sent."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    OPENED.append(connection)
    for piece in pieces:
        connection.sendall(piece)
    return connection


def post(body=b'{"prompt": "a"}', *more, path="/v1/completions", host=b"localhost",
         kind=b"application/json", length=None):  # fmt: skip
    """Returns the bytes of a request."""
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"host: " + host, b"content-type: " + kind]
    lines += [b"content-length: %d" % (len(body) if length is None else length), *more, b"", body]
    return b"\r\n".join(lines)


def read_all(connection):
    """Returns all bytes up to the server's close."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            received += piece
    return received


def answer(connection):
    """Returns (status, body) of one answer that has a length or ends with the connection."""
    head = b""
    while b"\r\n\r\n" not in head and (piece := connection.recv(65536)):
        head += piece
    head, _, body = head.partition(b"\r\n\r\n")
    lengths = [x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")]
    while lengths and len(body) < int(lengths[0].split(b":")[1]):
        body += connection.recv(65536)
    return int(head.split()[1]), body


if __name__ == "__main__":  # prints its port once it listens, and ends on a signal
    with bind("127.0.0.1", 0) as listening:
        limits = Limits(**json.loads(sys.argv[1]))
        app = make_app(offered(), Scripted("x" * 400, ""), limits)
        print(listening.getsockname()[1], flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as run_serve does
        with contextlib.suppress(KeyboardInterrupt):
            http_server(app, limits).run([listening])
