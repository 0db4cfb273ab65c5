"""Slow, idle, greedy and garbled connections are given up in time, the others find a place, and the
server ends.
"""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from compass_jax.config import ConfigError
from compass_jax.serving import limits as limits_module
from compass_jax.serving.bound import bind, is_loopback
from compass_jax.serving.limits import Limits, make_room_for

sys.path.insert(0, str(Path(__file__).parent))
from stub import answer, connect, hang_up, post, read_all, running

GET = b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(autouse=True)
def nothing_is_left_open():
    yield
    hang_up()


def waits(condition, seconds=20.0):
    """Whether the condition holds within a generous time."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def error_of(found):
    head, _, body = found.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def test_a_header_that_does_not_come_is_given_up_however_slowly_it_drips():
    with running(header_s=0.4) as (port, metrics, _):
        silent = connect(port)
        half = connect(port, b"POST /echo HTTP/1.1\r\nhost: local")
        began = time.monotonic()
        while time.monotonic() < began + 20:  # a byte now and then renews nothing
            try:
                half.sendall(b"x")
                time.sleep(0.05)
            except OSError:
                break
        assert time.monotonic() < began + 15
        assert read_all(silent) == b""
        assert 'reason="header"} 2' in metrics.page()


def test_half_a_header_is_answered_with_408_in_the_one_form_of_errors():
    with running(header_s=0.2) as (port, _, _):
        status, error = error_of(read_all(connect(port, b"POST /echo HTTP/1.1\r\nhost: local")))
        assert status == 408 and error["type"] == "invalid_request_error"
        assert "header did not come within 0.2 s" in error["message"]


def test_a_body_that_does_not_come_is_given_up():
    with running(body_s=0.3) as (port, _, app):
        status, error = error_of(read_all(connect(port, post(body=b"{", length=100))))
        assert status == 408 and "body did not come within 0.3 s" in error["message"]
        assert waits(lambda: app.open == 0)


def test_the_rest_of_a_body_that_was_refused_has_a_deadline_too():
    with running(body_s=0.3) as (port, _, _):
        made = connect(port, post(body=b"{", length=10**6, kind=b"text/plain"))
        assert answer(made)[0] == 415
        assert read_all(made) == b""  # closed


def test_an_endless_body_is_cut_off():
    with running(body_bytes=1000) as (port, metrics, _):
        made = connect(port, post(body=b"", length=10**9, kind=b"text/plain"))
        with pytest.raises(OSError):
            for _ in range(1000):
                made.sendall(b"x" * 10000)
                time.sleep(0.001)
        assert 'reason="size"} 1' in metrics.page()


def test_an_idle_connection_is_closed_and_one_that_is_used_is_kept():
    with running(idle_s=0.3, header_s=5) as (port, _, _):
        made = connect(port)
        for _ in range(3):
            made.sendall(post(body=b"{}"))
            assert answer(made) == (200, b"2")
            time.sleep(0.1)
        assert read_all(made) == b""


def test_a_reader_that_takes_nothing_is_given_up_and_its_answer_too():
    with running(stall_s=0.4, send_buffer_bytes=16384) as (port, metrics, app):
        made = connect(port, post("/stream"))
        assert made.recv(100)
        assert waits(lambda: app.open == 1) and waits(lambda: app.open == 0)
        assert 'reason="stall"} 1' in metrics.page()


def test_a_reader_that_sips_is_given_up_too():
    with running(stall_s=0.5, send_buffer_bytes=16384) as (port, metrics, app):
        made = connect(port, post("/stream"))
        until = time.monotonic() + 20
        while 'reason="stall"} 1' not in metrics.page() and time.monotonic() < until:
            made.recv(10)
            time.sleep(0.02)
        assert 'reason="stall"} 1' in metrics.page() and waits(lambda: app.open == 0)


def test_a_good_request_finds_a_place_among_idle_slow_and_unread_connections():
    """Twelve places are taken many times over by connections that nobody answers; none is
    refused.
    """
    with running(connections=12, send_buffer_bytes=16384) as (port, metrics, _):
        used = connect(port, post())
        assert answer(used)[0] == 200
        held = [
            connect(port, *piece)
            for piece in [(), (b"POST",), (post(length=50),), (post("/stream"),)] * 10
        ]
        time.sleep(0.3)
        for _ in range(5):
            assert answer(connect(port, GET)) == (200, b"0")
        open_now = int(re.search(r"^compass_connections (\d+)", metrics.page(), re.M)[1])
        assert len(held) == 40 and open_now <= 12
        assert read_all(used) == b""  # the oldest of them


def test_where_every_connection_is_being_answered_the_next_is_told():
    with running(connections=2) as (port, _, app):
        held = [connect(port, post("/sleep")) for _ in range(2)]
        assert waits(lambda: app.open == 2) and len(held) == 2
        status, error = error_of(read_all(connect(port)))
        assert status == 503 and "all 2 connections are being answered" in error["message"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50, 400),  # TLS
        (b"SSH-2.0-x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no host
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 50000 + b"\r\n", 431),
        (b"GET /" + b"a" * 200000, 431),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, gzip\r\n\r\n", 501),
    ],
)
def test_what_is_no_http_is_answered_in_the_one_form_of_errors(sent, status, caplog):
    with running() as (port, _, _):
        found, error = error_of(read_all(connect(port, sent)))
        assert found == status and "this is no HTTP request" in error["message"]
    assert caplog.text == ""


CHUNKED = b"content-type: application/json\r\ntransfer-encoding: chunked\r\n"


@pytest.mark.parametrize("length", [b"0", b"5", b"4", b"100"])
@pytest.mark.parametrize("before", [b"", GET])
def test_a_request_with_two_lengths_is_answered_and_the_connection_closed(length, before):
    """Chunks say where it ends; what stands behind it may be a part of it to a proxy in front."""
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\n" + CHUNKED
    body = b"5\r\nabcde\r\n0\r\n\r\n"
    for two in (
        b"content-length: " + length + b"\r\n\r\n",
        b"Content-Length:" + length + b"\r\n\r\n",
    ):
        with running() as (port, _, _):
            found = read_all(connect(port, before + head + two + body + GET))
            assert found.count(b"HTTP/1.1 200") == (2 if before else 1)
            assert found.endswith(b"\r\n\r\n5") and b"connection: close" in found.lower()


def test_a_request_with_chunks_alone_keeps_the_connection():
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\n" + CHUNKED + b"\r\n"
    with running() as (port, _, _):
        made = connect(port, head + b"5\r\nabcde\r\n0\r\n\r\n")
        assert answer(made) == (200, b"5")
        made.sendall(GET)
        assert answer(made) == (200, b"0")


def test_garbage_in_the_middle_of_requests_leaves_no_traceback_and_a_server_that_answers(caplog):
    chunked = (
        b"POST /sleep HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding:"
        b" chunked\r\n\r\n"
    )
    rejected = chunked.replace(b"host: a", b"host: localhost")
    pieces = [
        rejected + b"zz\r\n",
        rejected + b"5\r\nabcdefgh",
        chunked + b"zz\r\n",
        post("/sleep") + b"garbage\r\n\r\n",
        post() * 30,
        GET + b"\x00\x01\x02",
        b"CONNECT a:1 HTTP/1.1\r\nhost: localhost\r\n\r\nxyz",
        (
            b"GET /echo HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection:"
            b" upgrade\r\n\r\nxyz"
        ),
        (
            b"POST /echo HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-type:"
            b" application/json\r\ncontent-length: 9\r\n\r\n"
        ),
        b"HEAD /echo HTTP/1.0\r\n\r\n",
    ]
    with running(body_s=0.5, stop_s=0.2) as (port, _, app):
        held = [connect(port, piece) for piece in pieces for _ in range(2)]
        for made in held[::2]:
            made.close()  # and the others stay
        time.sleep(0.3)
        assert answer(connect(port, GET)) == (200, b"0")
    assert app.open == 0 and caplog.text == ""


def test_an_exception_is_answered_with_500_and_logged(caplog):
    with running() as (port, metrics, _):
        status, body = answer(connect(port, post("/fail")))
        assert (status, json.loads(body)["error"]["type"]) == (500, "server_error")
    assert "a request failed" in caplog.text and 'route="/fail",status="500"} 1' in metrics.page()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_the_server_ends_whatever_its_clients_do(number):
    """Half a header, half a body, an answer that never comes, a stream that is not read, one that
    is, an idle one.
    """
    given = json.dumps({"stop_s": 0.5, "send_buffer_bytes": 16384})
    command = [sys.executable, str(Path(__file__).parent / "stub.py"), given]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    port = int(process.stdout.readline())
    half = [(b"POST /echo HT",), (post(length=50),), (post("/sleep"),), (post("/stream"),)] * 3
    held = [connect(port), *(connect(port, *piece) for piece in half)]
    idle = connect(port, GET)
    assert answer(idle)[0] == 200
    time.sleep(0.2)
    began = time.monotonic()
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 0 and time.monotonic() - began < 10 and told == ""
    assert len(held) == 13


def test_what_cannot_be_interrupted_is_cut_off_in_the_end():
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import signal, stub\n"
        "async def stuck(scope, receive, send): time.sleep(60)\n"
        "made = stub.Limits(end_s=0.5)\n"
        "listening = stub.bind('127.0.0.1', 0, made)\n"
        "server = stub.http_server(stuck, listening, made, stub.Metrics())\n"
        "server.on_started = lambda: print(server.address[1], flush=True)\n"
        "server.run()\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    connect(int(process.stdout.readline()), GET)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 1 and "cut off" in told


def test_addresses_that_cannot_be_bound_are_told_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, port, told in (
            ("", 0, "--host is empty"),
            (" ", 0, "--host is empty"),
            ("no such host", 0, "--host 'no such host'"),
            ("x" * 300, 0, "--host 'xxx"),
            ("a\0b", 0, "--host 'a"),
            ("192.0.2.1", 0, "--host 192.0.2.1 --port 0: "),
            ("127.0.0.1", taken.getsockname()[1], "ddress already in use"),
        ):
            with pytest.raises(ConfigError, match=re.escape(told)) as caught:
                bind(host, port, Limits())
            assert "\n" not in str(caught.value)


def test_what_other_machines_reach_is_told_from_loopback():
    for host, expected in (
        ("127.0.0.1", True),
        ("localhost", True),
        ("127.1", True),
        ("0.0.0.0", False),
    ):
        with bind(host, 0, Limits()) as bound:
            assert is_loopback(bound) is expected


def test_connections_stay_below_the_descriptors(monkeypatch):
    asked = []
    monkeypatch.setattr(limits_module.resource, "getrlimit", lambda _: (1024, 2000))
    monkeypatch.setattr(limits_module.resource, "setrlimit", lambda _, both: asked.append(both))
    make_room_for(512, 100)
    assert asked == []
    make_room_for(1500, 100)
    assert asked == [(1820, 2000)]
    with pytest.raises(
        ConfigError,
        match="needs 2320 file descriptors and this process may have 2000: give at most 1680",
    ):
        make_room_for(2000, 100)
    with pytest.raises(
        ConfigError,
        match="--max-connections 99: slots and queue alone may hold 99; give at least 100",
    ):
        make_room_for(99, 100)
