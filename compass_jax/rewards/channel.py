"""Lines of JSON between the scorer and a worker, over a socket. The worker's side is not trusted.

scorer -> {"checks": ..., "tag": ..., "timeout_s": ..., "guards": ...}     once
worker -> ["ready", ""]  or  ["failed", traceback]  or  ["refused", what a person did wrong]
scorer -> [[source, response, row, prompt, rows], ...]    when all earlier answers have come
worker -> ["begun", ""]                             it has them, or goes on with them
worker -> [index, reward or null, outcome, detail, components, extracted, says]   each, in order
"""

from __future__ import annotations

import json
import math
import socket
from typing import Any, NamedTuple

from compass_jax.errors import CompassError
from compass_jax.untrusted import parse_json

LINE_BYTES = 2**16
SEND_LIMIT_S = 30.0  # a worker reads at once; one that does not is lost
OUTCOMES = ("ok", "error", "timeout", "crash", "unjudged")


class ChannelError(CompassError, ValueError):
    """A worker sent what no worker sends."""


class Said(NamedTuple):
    """A worker's word about itself: "ready", "failed", "refused" or "begun"."""

    word: str
    detail: str


class Answered(NamedTuple):
    """A worker's answer about the response at `index` of the batch; `reward` is None if unknown.
    `extracted`: the response had an answer to judge.
    """

    index: int  # type: ignore[assignment]  # the tuple's own `index` is not needed
    reward: float | None
    outcome: str
    detail: str
    components: dict[str, float]
    extracted: bool
    says: str = ""  # what an environment answers


class Channel:
    """The scorer's end. Only one thread may use it."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._held = b""

    def send(self, value: Any) -> None:
        """Sends `value` as a line. Raises OSError where the worker is gone or does not read."""
        self.connection.settimeout(SEND_LIMIT_S)
        self.connection.sendall(line(value))

    def receive(self) -> list[Said | Answered]:
        """What has come since the last call; does not wait.

        Raises EOFError at the end, ChannelError for anything but the lines of this module.
        """
        self.connection.settimeout(0)
        try:
            while part := self.connection.recv(LINE_BYTES):
                self._held += part
                if b"\n" in part:
                    break
                if len(self._held) > LINE_BYTES:
                    raise ChannelError(f"a line of more than {LINE_BYTES} bytes")
            if not part:
                raise EOFError
        except BlockingIOError:
            pass
        *lines, self._held = self._held.split(b"\n")
        return [parse(one) for one in lines]

    def close(self) -> None:
        """Closes the socket."""
        self.connection.close()


def line(value: Any) -> bytes:
    """`value` as one line of ASCII."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def parse(text: bytes) -> Said | Answered:
    """The one line `text`. Raises ChannelError for any other form than the two."""
    if len(text) > LINE_BYTES:
        raise ChannelError(f"a line of more than {LINE_BYTES} bytes")
    value = parse_json(text, "a verifier worker's line", error=ChannelError, most_depth=2)
    match value:
        case ["ready" | "failed" | "refused" | "begun" as word, str(detail)]:
            return Said(word, detail)
        case [
            int(index),
            float() | None as reward,
            str(outcome),
            str(detail),
            dict(parts),
            bool(extracted),
            str(says),
        ]:
            known = reward is not None and math.isfinite(reward)
            numbers = all(type(part) is float for part in parts.values()) and (known or not parts)
            fits = outcome in OUTCOMES and known == (outcome == "ok") and type(index) is int
            fits = fits and (known or not says)
            if numbers and fits:
                return Answered(index, reward, outcome, detail, parts, extracted, says)
    raise ChannelError(f"a line of no known form: {text[:200]!r}")
