"""The process of a driver: JSON lines in both directions, and a log of what it prints.

    trainer to driver   a line of setup, then {"play": ...} and {"cancel": session}
    driver to trainer   {"ready": true} or {"refused": reason}, then for each episode
                        {"done": {"session", "reward", "metrics", "agent", "end"}} or
                        {"failed": {"session", "detail"}}

A driver is trusted code of the user's: it may use the network and keep state. It can still fail:
it hangs, dies, floods or writes what is no message. All of that ends the process; another one plays
its episodes anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.data.episodes import Command

MOST_LINE = 2**20  # bytes of a message
LAST_WORDS = 1000  # characters of the log in a message
KINDS = {"ready", "refused", "done", "failed"}
END_S = 5.0  # time that a driver has to end


class Said(NamedTuple):
    """A message of a driver."""

    driver: Driver
    message: JsonObject


class Ended(NamedTuple):
    """The end of a driver's process."""

    driver: Driver
    reason: str


class Driver:
    """A driver's process. `emit` gets its messages, from another thread.

    Args:
        command: the command that starts it.
        setup: its first line.
        log: file of what it prints.
    """

    def __init__(
        self, command: Command, setup: Json, log: Path, emit: Callable[[Said | Ended], None]
    ) -> None:
        self._emit, self._log = emit, log
        self.ready = False
        self._closed = False
        self._orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command.words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=command.variables,
                start_new_session=True,
            )
        self.send(setup)
        for target in (self._write, self._read):
            threading.Thread(target=target, daemon=True).start()

    def send(self, message: Json) -> None:
        """Sends a message; one to a driver that has ended is lost."""
        self._orders.put(json.dumps(message) + "\n")

    def close(self) -> None:
        """Ends the process and all that it started in its session."""
        self._closed = True
        self._orders.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _write(self) -> None:
        pipe: IO[bytes] | None = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError, ValueError), pipe:
            while (line := self._orders.get()) is not None:
                pipe.write(line.encode())
                pipe.flush()

    def _read(self) -> None:
        pipe, fault = self._process.stdout, ""
        assert pipe is not None
        with pipe:
            while not fault and (line := pipe.readline(MOST_LINE + 1)):
                message = _parsed(line)
                if message is None:
                    fault = f"it wrote what is no message: {line[:100]!r}"
                else:
                    self._emit(Said(self, message))
        if not fault:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)  # for its status
        self._kill()
        if not self._closed:
            code = self._process.returncode
            why = fault or f"its process ended with status {code}"
            self._emit(Ended(self, f"the driver failed: {why}{self._last_words()}"))

    def _last_words(self) -> str:
        text = self._log.read_bytes()[-LAST_WORDS:].decode(errors="replace").strip()
        return f"; its log, {self._log}, ends: {text}" if text else f"; its log is {self._log}"


def _parsed(line: bytes) -> JsonObject | None:
    """Returns the message of a line; None for one that is too long, or none of the protocol's."""
    if len(line) > MOST_LINE:
        return None
    try:
        message = json.loads(line)
    except ValueError:
        return None
    known = isinstance(message, dict) and len(message) == 1 and {*message} <= KINDS
    return message if known else None
