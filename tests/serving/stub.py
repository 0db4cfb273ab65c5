"""A server over an application of a few lines, in this process or as one of its own: what is tested
is the network's side.
"""

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time

from compass_jax.serving.bound import bind
from compass_jax.serving.connections import http_server
from compass_jax.serving.guard import Guard
from compass_jax.serving.limits import Limits
from compass_jax.serving.metrics import Metrics


class Stub:
    """/echo: the body's length. /stream: pieces for ever. /sleep: nothing for a minute. /fail: an
    exception.
    """

    routes = ("/echo", "/stream", "/sleep", "/fail")

    def __init__(self):
        self.open = 0

    async def __call__(self, scope, receive, send):
        self.open += 1
        try:
            await self.answer(scope, receive, send)
        finally:
            self.open -= 1

    async def answer(self, scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["path"] == "/fail":
            raise KeyError("a bug")
        if scope["path"] == "/sleep":
            await asyncio.wait([asyncio.ensure_future(receive())], timeout=60)
            return
        said = json.dumps(len(body)).encode()
        headers = [] if scope["path"] == "/stream" else [(b"content-length", b"%d" % len(said))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/stream":
            left = asyncio.ensure_future(receive())
            while not left.done():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": said})


@contextlib.contextmanager
def running(key=None, hosts=(), **limits):
    """(port, metrics, the stub) of a server that runs meanwhile."""
    made = Limits(**{"stop_s": 0.2, **limits})
    metrics = Metrics()
    app = Stub()
    with bind("127.0.0.1", 0, made) as listening:
        port = listening.getsockname()[1]
        server = http_server(Guard(app, hosts, key, made, metrics), listening, made, metrics)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield port, metrics, app
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


OPENED = []  # connections, which `hang_up` closes


def hang_up():
    """Closes every connection."""
    while OPENED:
        OPENED.pop().close()


def connect(port, *pieces):
    """A connection on which these bytes were sent."""
    made = socket.create_connection(("127.0.0.1", port), timeout=20)
    OPENED.append(made)
    for piece in pieces:
        made.sendall(piece)
    return made


def post(path="/echo", body=b"{}", *more, host=b"localhost", kind=b"application/json", length=None):
    """The bytes of a request."""
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"host: " + host, b"content-type: " + kind]
    lines += [b"content-length: %d" % (len(body) if length is None else length), *more, b"", body]
    return b"\r\n".join(lines)


def read_all(made):
    """What comes until the server closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := made.recv(65536):
            found += piece
    return found


def answer(made):
    """(status, body) of one answer that has a length or ends with the connection."""
    head = b""
    while b"\r\n\r\n" not in head and (piece := made.recv(65536)):
        head += piece
    head, _, body = head.partition(b"\r\n\r\n")
    lengths = [x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")]
    while lengths and len(body) < int(lengths[0].split(b":")[1]):
        body += made.recv(65536)
    return int(head.split()[1]), body


if __name__ == "__main__":  # a process that ends when it is told, and says when it listens
    limits = Limits(**json.loads(sys.argv[1]))
    with bind("127.0.0.1", 0, limits) as listening:
        metrics = Metrics()
        server = http_server(Guard(Stub(), [], None, limits, metrics), listening, limits, metrics)
        server.on_started = lambda: print(server.address[1], flush=True)
        server.run()
