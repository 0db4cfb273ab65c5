"""Faults of HTTP requests: bodies, headers, connections. After each one an honest client must get
its greedy text, promptly.

What a body means is decided here by OpenAI's documentation of the fields and the README's limits
(`legal`). A body that is not legal has to be refused with a status from 400 to 499 and JSON that
names the field. Of a legal one the answer must have the choices that were asked for, and for the
honest prompt, drawn greedily, the undisturbed text, cut where fewer tokens were asked for. What
the server writes to its log may hold no traceback.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from typing import Any

from .bodies import FIELD_VALUES, legal
from .odd_requests import odd_requests
from .strict import ODD_VALUES, damage_bytes, damage_json, odd_encoding, strict_json
from .wire import HONEST, PATIENCE_S, Reply, Server, exchange, request
from .words import CLEAR, HANG, HARMLESS, LOST, SILENT, TRACEBACK, Verdict, last, squeezed
from .world import Case

SHARE = 11
_SERVERS: list[Server] = []
CHAT = {
    "messages": [{"role": "user", "content": "What is 3 + 4?"}],
    "max_tokens": 6,
    "temperature": 0,
}


def close() -> None:
    """Ends this process's server."""
    while _SERVERS:
        _SERVERS.pop().close()


def run(case: Case) -> Verdict:
    """One request, or several connections; then the honest client."""
    if _SERVERS and _SERVERS[0].child.poll() is not None:
        close()
    if not _SERVERS:
        _SERVERS.append(Server(case.world))
    server, before = _SERVERS[0], len(_SERVERS[0].errors())
    kind = case.rng.choice(["body"] * 9 + ["bytes"] * 3 + ["http"] * 5 + ["connections"] * 2)
    with contextlib.ExitStack() as held:
        verdict = {"body": _body, "bytes": _bytes, "http": _http, "connections": _connections}[
            kind
        ](case, server, held)
        began = time.monotonic()
        text = server.greedy(6)
        waited = time.monotonic() - began
    said = server.errors()[before:]
    if server.child.poll() is not None:
        close()
        return Verdict(TRACEBACK, f"the server ended: {last(said)}")
    if text is None:
        close()  # the next fault gets another one
        return Verdict(
            HANG,
            f"the honest client got nothing in {waited:.1f} s; before: {verdict.word}"
            f" {verdict.why}",
        )
    if not (server.text or "").startswith(text):
        return Verdict(
            LOST, f"the honest client got {text!r} and not the beginning of {server.text!r}"
        )
    if "Traceback" in said:
        return Verdict(TRACEBACK, f"in the log: {last(said)}")
    return verdict


# ---- bodies ------------------------------------------------------------------------------------


def _body(case: Case, server: Server, held: Any) -> Verdict:
    rng = case.rng
    chat = rng.random() < 0.5
    base = dict(CHAT if chat else HONEST)
    if rng.random() < 0.6:
        name = rng.choice(
            [
                n
                for n in FIELD_VALUES
                if n not in (("prompt", "best_of", "echo", "suffix") if chat else ("messages",))
            ]
        )
        base[name] = rng.choice(
            [*FIELD_VALUES[name], *([rng.choice(ODD_VALUES)] if rng.random() < 0.3 else [])]
        )
        text, told = json.dumps(base), f"{name} = {str(base[name])[:60]!r}"
    else:
        text, told, _ = damage_json(base, rng)
    case.tell(f"POST {'chat' if chat else 'completions'}: {told}")
    data = text.encode("utf-8", "surrogatepass")
    return _answered(case, server, chat, data, request(_path(chat), data, port=server.port))


def _path(chat: bool) -> str:
    return "/v1/chat/completions" if chat else "/v1/completions"


def _bytes(case: Case, server: Server, held: Any) -> Verdict:
    chat = case.rng.random() < 0.5
    text = json.dumps(CHAT if chat else HONEST)
    data, told = (
        damage_bytes(text.encode(), case.rng)
        if case.rng.random() < 0.7
        else odd_encoding(text, case.rng)
    )
    if case.rng.random() < 0.15:
        data, told = case.rng.choice(
            [
                (b"[" * 200_000, "200,000 brackets"),
                (b"", "an empty body"),
                (b'{"a":' * 90_000, "90,000 objects"),
                (b" " * 900_000, "blanks"),
            ]
        )
    case.tell(f"POST {'chat' if chat else 'completions'}: {told}")
    return _answered(case, server, chat, data, request(_path(chat), data, port=server.port))


def _answered(case: Case, server: Server, chat: bool, data: bytes, raw: bytes) -> Verdict:
    """The verdict on a body that was sent."""
    try:
        body = strict_json(data)
        wrong = legal(body, chat)
    except ValueError:
        body, wrong = None, ""
    reply = exchange(server.port, raw)
    if reply.status != 200:
        return refused(reply, wrong or "")
    if wrong is not None:
        return Verdict(SILENT, f"answered, though {wrong or 'the body'} is not legal")
    return _right(body, chat, reply, server)


def refused(reply: Reply, name: str) -> Verdict:
    """The verdict on a request that was not answered with 200."""
    if reply.status == -1:
        return Verdict(HANG, f"no answer in {PATIENCE_S:.0f} s")
    if not 400 <= reply.status < 500:
        return Verdict(TRACEBACK, f"status {reply.status}: {reply.body[:200]!r}")
    value = reply.value()
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict) or not error.get("message"):
        return Verdict(
            TRACEBACK, f"status {reply.status} without a message in JSON: {reply.body[:200]!r}"
        )
    said = squeezed(f"{error['message']} {error.get('param')}")
    shown = name.encode("utf-8", "replace").decode()
    if name and squeezed(shown[:30]) not in said and squeezed(ascii(name)[1:-1][:30]) not in said:
        return Verdict(
            TRACEBACK,
            f"status {reply.status} does not name {name[:40]!r}: {error['message'][:200]}",
        )
    return Verdict(CLEAR, error["message"][:200])


def _right(body: dict, chat: bool, reply: Reply, server: Server) -> Verdict:
    """Whether a legal request has the answer that it asks for."""
    if body.get("stream"):
        events = [
            line[6:] for line in reply.body.decode().split("\n\n") if line.startswith("data: ")
        ]
        if not events or events[-1] != "[DONE]":
            return Verdict(SILENT, f"a stream that does not end: {events[-1:]}")
        return Verdict(HARMLESS)
    value, prompts = reply.value(), body.get("prompt")
    choices = value.get("choices") if isinstance(value, dict) else None
    several = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
    if not isinstance(choices, list) or len(choices) != (body.get("n") or 1) * several:
        return Verdict(
            SILENT, f"{len(choices or [])} choices for n = {body.get('n')} of {several} prompts"
        )
    if (
        not chat
        and prompts == HONEST["prompt"]
        and body.get("temperature") == 0
        and not body.get("stop")
    ):
        begin = prompts if body.get("echo") else ""
        found = [c["text"].removeprefix(begin) for c in choices]
        wrong = [text for text in found if not (server.text or "").startswith(text)]
        if wrong:
            return Verdict(
                SILENT, f"the text {wrong[0]!r} and not the beginning of {server.text!r}"
            )
    return Verdict(HARMLESS)


# ---- headers and connections
# ---------------------------------------------------------------------------------------------


# Sound but odd: answered or refused, both are right.
EITHER = ("a header of 100 kB", "3,000 headers", "a line end alone", "HTTP/9.9")


def _http(case: Case, server: Server, held: Any) -> Verdict:
    told, data, may = case.rng.choice(odd_requests(server.port, case.rng))
    port = server.port
    case.tell(f"HTTP: {told}")
    # Bytes that are no request may simply be hung up on, and what the body of 10^12 would be
    # nobody waits for.
    reply = exchange(port, data)
    if reply.status == 200:
        return Verdict(HARMLESS) if may else Verdict(SILENT, "answered")
    if reply.status == 0 and told in (
        "rubbish",
        "the hello of TLS",
        "a path of 60 kB",
        "a header of 100 kB",
        "3,000 headers",
        "a body of 2 MB",
    ):
        return Verdict(CLEAR, "hung up")
    if told == "metrics" and reply.status == 404:
        return Verdict(CLEAR, "no such path")
    if reply.status == -1 and told in (
        "chunks of rubbish",
        "a length that is far too long, over the limit",
    ):
        return Verdict(HARMLESS)  # what was promised never came: the sender waits for itself
    if reply.status == -1:
        return Verdict(HANG, f"no answer in {PATIENCE_S:.0f} s")
    if 400 <= reply.status < 500:
        may = may and told not in EITHER
        return (
            Verdict(TRACEBACK, f"refused with {reply.status}: {reply.body[:100]!r}")
            if may and told != "a header that is not ASCII"
            else Verdict(CLEAR, f"{reply.status}")
        )
    if reply.status == 100 and told == "100-continue":
        return Verdict(HARMLESS)
    return Verdict(TRACEBACK, f"status {reply.status}: {reply.body[:200]!r}")


def _connections(case: Case, server: Server, held: Any) -> Verdict:
    """Connections that are opened and not used as they should be; they are held while the honest
    client asks.
    """
    rng = case.rng
    plain = request(
        "/v1/completions", json.dumps(HONEST | {"max_tokens": 16}).encode(), port=server.port
    )
    stream = request(
        "/v1/completions",
        json.dumps(HONEST | {"max_tokens": 16, "stream": True}).encode(),
        port=server.port,
    )
    faults = {
        "says nothing": b"",
        "half a line": plain[:9],
        "half a header": plain[:60],
        "half a body": plain[:-10],
        "leaves at once": plain,
        "resets": plain,
        "never reads its stream": stream,
        "leaves its stream": stream,
        "closes its side": plain[:-10],
        "two at once": plain + plain,
    }
    told, times = rng.choice(list(faults)), rng.choice([1, 5, 40])
    case.tell(f"{times} connections: {told}")
    for _ in range(times):
        try:
            link = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
        except OSError as error:
            return Verdict(TRACEBACK, f"no connection: {error}")
        held.callback(link.close)
        link.settimeout(PATIENCE_S)
        with contextlib.suppress(OSError):
            link.sendall(faults[told])
            if told == "resets":
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                link.close()
            elif told in ("leaves at once", "leaves its stream"):
                link.close()
            elif told == "closes its side":
                link.shutdown(socket.SHUT_WR)
    return Verdict(HARMLESS)
