"""Messages for errors that need no traceback."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from pathlib import Path

from compass_jax.base.errors import CompassError
from compass_jax.config.errors import first_line
from compass_jax.runs.logfile import room


def in_words(error: Exception) -> str | None:
    """Returns one line for an error of this package, of the system (OSError) or of memory; None for
    a bug, whose traceback is needed.

    If the reader of standard output is gone, redirects the output to the null device, because the
    interpreter would complain at its exit.
    """
    if isinstance(error, CompassError):
        return str(error)
    if isinstance(error, BrokenPipeError):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return "a pipe was closed by its reader (standard output?); nothing more is written"
    if isinstance(error, OSError):
        files = [str(name)[:200] for name in (error.filename, error.filename2) if name is not None]
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        free = room(Path(files[0] if files else ".")) if full else ""
        where = f"{' -> '.join(files)}{free}: " if files or free else ""
        return f"{where}{error.strerror or first_line(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames and Path(frames[-1].filename).name == "xla_bridge.py":  # JAX's search for devices
        return _no_device(error)
    if isinstance(error, MemoryError):
        return f"not enough memory: {first_line(error)}"
    return None


def _no_device(error: Exception) -> str:
    """Returns JAX's cause on one line, and the remedy."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    cause = " ".join(str(error).split())[:500] or f"{type(error).__name__} without a message"
    setting = f"JAX_PLATFORMS = {platforms!r}: " if platforms else ""
    remedy = "set JAX_PLATFORMS to what this machine has (cpu, for example), or unset it"
    if "tpu" in platforms:
        remedy = (
            f"see that no other process holds the TPU and that libtpu is installed, or {remedy}"
        )
    return f"{setting}no device can be used: {cause}; {remedy}"
