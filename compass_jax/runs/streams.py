"""Standard output and standard error of a command. The parent process may have closed them, or
connected them to a pipe or terminal that cannot encode every character or disappears.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

NAMES = {1: "stdout", 2: "stderr"}


def prepare_streams() -> None:
    """Opens closed standard descriptors, and escapes characters that a stream cannot encode.

    Otherwise the next opened file would get a closed descriptor, and a child's output would end up
    in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in NAMES.values():
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # as long as sys
            setattr(sys, name, stream)
        with contextlib.suppress(AttributeError, ValueError):  # not every replacement can
            stream.reconfigure(errors="backslashreplace")


def outlast_streams() -> None:
    """Lets the process continue when its output cannot be written any more: a pipe without a
    reader, a closed terminal, a full disk. It is for commands whose results are files.
    """
    for number, name in NAMES.items():
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and _leads_to(stream, number):
            setattr(sys, name, _lasting(number, stream))


def _leads_to(stream: io.TextIOWrapper, number: int) -> bool:
    try:
        stream.flush()
        return stream.fileno() == number
    except (OSError, ValueError):
        return False


def _lasting(number: int, stream: io.TextIOWrapper) -> io.TextIOWrapper:
    raw = _LastingFile(number, "w", closefd=False)
    unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _LastingFile(io.FileIO):
    """A descriptor that discards data after the first error."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        """Writes `data`, or drops it after an error."""
        try:
            return super().write(data)
        except OSError as error:
            number = self.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
            text = f"standard {'output' if number == 1 else 'error'} cannot be written"
            text += f" ({error.strerror}): nothing more is printed there, and the work goes on\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode())
            return memoryview(data).nbytes
