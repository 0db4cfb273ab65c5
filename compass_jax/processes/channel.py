"""A channel between two processes that carries JSON values, one per line. The other end is
untrusted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import time
from collections.abc import Callable
from typing import Any

from compass_jax.errors import CompassError

PART_BYTES = 2**16


class ChannelError(CompassError, ValueError):
    """The other end sent too much data, or a line that is not JSON."""


class Channel:
    """One end of a channel. Only one thread may use it.

    Each method raises TimeoutError at `end`, a time on the monotonic clock; EOFError if the other
    end is closed; and ChannelError for more than `limit` unread bytes.

    Args:
        reader: file descriptor to read from.
        writer: file descriptor to write to. Both are closed with this object.
        limit: maximum number of unread bytes.
    """

    def __init__(self, reader: int, writer: int, limit: int = 2**22):
        self._reader, self._writer, self._limit = reader, writer, limit
        self._unread = bytearray()
        for descriptor in (reader, writer):
            os.set_blocking(descriptor, False)

    def send(self, value: Any, end: float = math.inf) -> None:
        """Sends a JSON value."""
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        self._transfer(line, end, lambda: True)

    def receive(self, end: float = math.inf) -> Any:
        """Returns the next JSON value."""
        self._transfer(b"", end, lambda: b"\n" in self._unread)
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ChannelError(f"a line that is no JSON: {bytes(line[:100])!r}") from error

    def read_all(self, sent: bytes, end: float) -> bytes:
        """Sends bytes, closes the writer, and returns all bytes until the other end is closed."""
        with contextlib.suppress(EOFError):
            self._transfer(sent, end, lambda: False, closes=True)
        return bytes(self._unread)

    def _transfer(
        self, unsent: bytes, end: float, enough: Callable[[], bool], closes: bool = False
    ) -> None:
        """Writes and reads concurrently, until everything is written and `enough` returns true.

        closes: whether to close the writer when everything is written.
        """
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        if unsent:
            poll.register(self._writer, select.POLLOUT)
        while unsent or not enough():
            if closes and not unsent:
                self._close_writer()
            left = end - time.monotonic()
            ready = dict(poll.poll(None if left == math.inf else max(0.0, left) * 1000))
            if not ready:
                raise TimeoutError("no answer in time")
            if unsent and self._writer in ready:
                unsent = self._write(unsent)
                if not unsent:
                    poll.unregister(self._writer)
            if self._reader in ready:
                self._read()

    def _write(self, unsent: bytes) -> bytes:
        """Returns the bytes that remain unsent; empty if the other end is closed."""
        try:
            return unsent[os.write(self._writer, unsent[:PART_BYTES]) :]
        except BlockingIOError:
            return unsent
        except OSError:
            return b""

    def _read(self) -> None:
        try:
            part = os.read(self._reader, PART_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise EOFError(str(error)) from error
        if not part:
            raise EOFError("the other end is closed")
        self._unread += part
        if len(self._unread) > self._limit:
            raise ChannelError(f"it wrote more than {self._limit:,} bytes")

    def _close_writer(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def close(self) -> None:
        """Closes both halves. May be called twice."""
        self._close_writer()
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1
