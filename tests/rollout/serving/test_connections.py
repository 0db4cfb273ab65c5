"""HTTP below the API: malformed requests leave no trace, limits hold, and the server stops."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stub import Scripted, answer, connect, hang_up, post, read_all, running

from compass_jax.config import ConfigError
from compass_jax.rollout.serving import limits as limits_module
from compass_jax.rollout.serving.limits import bind, is_loopback, make_room_for

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
METRICS = GET.replace(b"/health", b"/metrics")
STREAM = post(b'{"prompt": "a", "stream": true}')


def waits(condition, seconds=20.0):
    """Returns whether the condition becomes true within a generous time."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def error_of(response):
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def test_a_body_that_does_not_come_is_given_up():
    with running(prepare_s=0.3) as port:
        status, body = answer(connect(port, post(b"{", length=100)))
        assert status == 408 and b"did not come within 0.3 s" in body


def test_more_requests_and_connections_than_the_limits_are_refused():
    with running(preparing=2) as port:
        clients = [connect(port, post(b"{", length=100)) for _ in range(2)]
        assert waits(lambda: b"compass_preparing 2.0\n" in answer(connect(port, METRICS))[1])
        page = answer(connect(port, METRICS))[1].decode()
        assert "\ncompass_slots 2.0\n" in page
        assert float(re.search(r"^compass_connections (\S+)$", page, re.M)[1]) >= 3
        status, body = answer(connect(port, post()))
        assert status == 429 and b"2 requests are being prepared" in body
        for one in clients:
            one.close()
        assert waits(lambda: answer(connect(port, post()))[0] == 200)
    with running(connections=2) as port:
        clients = [connect(port) for _ in range(2)]
        time.sleep(0.2)
        status, error = error_of(read_all(connect(port)))
        assert status == 503 and "2 connections are open" in error["message"] and len(clients) == 2


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_beyond_the_limit_is_refused(declared):
    body = b'{"prompt": "%s"}' % (b"x" * 2000)
    sent = post(body)
    if not declared:
        length = b"content-length: %d" % len(body)
        sent = post(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
        sent += b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        assert length not in sent
    with running(body_bytes=1000) as port:
        status, content = answer(connect(port, sent))
        assert status == 413 and b"the body exceeds 1000 bytes" in content


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,  # TLS
        b"SSH-2.0-x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no host header
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 50000 + b"\r\n",
        b"GET /" + b"a" * 200000,
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, gzip\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_in_the_one_form_of_errors(sent, caplog):
    with running() as port:
        status, error = error_of(read_all(connect(port, sent)))
        assert status == 400 and "this is no HTTP request" in error["message"]
    assert caplog.text == ""


CHUNKED = b"content-type: application/json\r\ntransfer-encoding: chunked\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + CHUNKED
CHUNKS = b'f\r\n{"prompt": "a"}\r\n0\r\n\r\n'


@pytest.mark.parametrize("length", [b"0", b"5", b"4", b"100"])
@pytest.mark.parametrize("before", [b"", GET])
def test_a_request_with_two_lengths_is_answered_and_the_connection_closed(length, before):
    """The chunks determine where the request ends. A proxy in front may count the bytes after it as
    part of it, so the connection closes.
    """
    with running() as port:
        for two in (b"content-length: ", b"Content-Length:"):
            sent = before + HEAD + two + length + b"\r\n\r\n" + CHUNKS + GET
            received = read_all(connect(port, sent))
            assert received.count(b"HTTP/1.1 200") == (2 if before else 1)
            assert b'"text": "ok"' in received and b"connection: close" in received.lower()
        connection = connect(port, HEAD + b"\r\n" + CHUNKS)  # chunks alone: it stays open
        assert answer(connection)[0] == 200
        connection.sendall(GET)
        assert answer(connection)[0] == 200


def test_garbage_in_the_middle_of_requests_leaves_no_traceback_and_a_server_that_answers(caplog):
    pieces = [
        HEAD + b"\r\nzz\r\n",
        HEAD + b"\r\n5\r\nabcdefgh",
        HEAD.replace(b"localhost", b"a") + b"\r\nzz\r\n",
        STREAM + b"garbage\r\n\r\n",
        post() * 30,
        GET + b"\x00\x01\x02",
        b"CONNECT a:1 HTTP/1.1\r\nhost: localhost\r\n\r\nxyz",
        GET.replace(b"\r\n\r\n", b"\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nxyz"),
        post(b"", b"expect: 100-continue", length=9),
        b"HEAD /health HTTP/1.0\r\n\r\n",
    ]
    batcher = Scripted("x" * 100, "")
    with running(batcher, prepare_s=0.5) as port:
        connections = [connect(port, piece) for piece in pieces for _ in range(2)]
        for connection in connections[::2]:
            connection.close()  # the other connections stay open
        time.sleep(0.3)
        assert answer(connect(port, GET))[0] == 200
    # asyncio's warning when it writes to a client that has disconnected, under load
    asyncio_warning = "socket.send() raised exception."
    assert [x for x in caplog.records if x.getMessage() != asyncio_warning] == []


def test_an_exception_is_answered_with_500_and_logged(caplog):
    def broken(groups):
        raise KeyError("a bug")

    with running(Scripted(submitted=broken)) as port:
        status, body = answer(connect(port, post()))
        assert (status, json.loads(body)["error"]["type"]) == (500, "server_error")
        page = answer(connect(port, METRICS))[1]
    assert "a request failed" in caplog.text and "a bug" in caplog.text
    assert b'compass_requests_total{route="/v1/completions",status="500"}' in page


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_gives_up_its_requests(stream):
    batcher = Scripted("some text", "")
    body = json.dumps({"prompt": ["a", "b"], "stream": stream}).encode()
    with running(batcher) as port:
        connection = connect(port, post(body))
        assert waits(lambda: len(batcher.prompts) == 2)
        if stream:
            assert connection.recv(100)
        connection.close()
        assert waits(lambda: len(set(batcher.cancelled)) == 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_the_server_ends_whatever_its_clients_do(number):
    """The clients have sent half a header or half a body, wait for answers that never come, or are
    idle.
    """
    command = [sys.executable, str(Path(__file__).parent / "stub.py"), '{"stop_s": 0.5}']
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    port = int(process.stdout.readline())
    half = [(), (b"POST /echo HT",), (post(length=50),), (post(),), (STREAM,)] * 3
    clients = [connect(port, *piece) for piece in half]
    idle = connect(port, GET)
    assert answer(idle)[0] == 200 and len(clients) == 15
    time.sleep(0.2)
    start = time.monotonic()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0 and time.monotonic() - start < 10 and stderr == ""
    hang_up()


def test_addresses_that_cannot_be_bound_are_told_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for host, port, message in (
            ("", 0, "--host is empty"),
            (" ", 0, "--host is empty"),
            ("no such host", 0, "--host 'no such host'"),
            ("x" * 300, 0, "--host 'xxx"),
            ("a\0b", 0, "--host 'a"),
            ("192.0.2.1", 0, "--host '192.0.2.1' --port 0: "),
            ("127.0.0.1", listener.getsockname()[1], "ddress already in use"),
        ):
            with pytest.raises(ConfigError, match=re.escape(message)) as caught:
                bind(host, port)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("127.1", True), ("0.0.0.0", False)],
)
def test_what_other_machines_reach_is_told_from_loopback(host, loopback):
    with bind(host, 0) as bound:
        assert is_loopback(bound) is loopback
        assert bound.proto == socket.IPPROTO_TCP, "asyncio sets TCP_NODELAY for this protocol alone"


def test_connections_stay_below_the_descriptors(monkeypatch):
    applied = []
    monkeypatch.setattr(limits_module.resource, "getrlimit", lambda _: (1024, 2000))
    monkeypatch.setattr(limits_module.resource, "setrlimit", lambda _, pair: applied.append(pair))
    make_room_for(512, 100)
    assert applied == []
    make_room_for(1500, 100)
    assert applied == [(1820, 2000)]
    text = "needs 2320 file descriptors and this process may have 2000: give at most 1680"
    with pytest.raises(ConfigError, match=text):
        make_room_for(2000, 100)
    text = "--max-connections 99: slots and queue alone may hold 99; give at least 100"
    with pytest.raises(ConfigError, match=text):
        make_room_for(99, 100)
