"""Disk errors as one-line messages with a remedy."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_STRAGGLERS_S = 0.2  # wait for reports of threads that arrive after the error
_NEVER_AWAITED = "coroutine 'async_serialize_from_host"
_REMEDIES = {
    errno.ENOSPC: "free some space there, or lower keep_checkpoints",
    errno.EDQUOT: "free some of your quota there, or lower keep_checkpoints",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EROFS: "mount it for writing, or choose another directory",
    errno.EACCES: "make it writable for this user, or choose another directory",
    errno.EPERM: "make it writable for this user, or choose another directory",
}


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """Suppresses reports of orbax and tensorstore threads about an error that is also raised.

    orbax logs it with tracebacks, even after the block, because a save continues in the background;
    asyncio logs orbax's tasks and futures whose error was not retrieved, and Python warns of
    coroutines that orbax then never awaits. tensorstore reports to an event loop that is already
    closed.
    """
    warnings.filterwarnings("ignore", _NEVER_AWAITED, RuntimeWarning)
    logging.getLogger("absl").addFilter(_not_of_orbax)
    logging.getLogger("asyncio").addFilter(_no_future_of_orbax)
    hook = sys.unraisablehook

    def report(args: Any) -> None:
        error = args.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            hook(args)

    sys.unraisablehook = report
    try:
        yield
    except Exception:
        time.sleep(_STRAGGLERS_S)
        raise
    finally:
        sys.unraisablehook = hook


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname


def _no_future_of_orbax(record: logging.LogRecord) -> bool:
    text = str(record.msg)  # names a file of orbax, or orbax's temporary directory of the save
    return "orbax" not in text or "exception was never retrieved" not in text


def failure(step: int, final: Path, error: Exception, size: int, free: int | None) -> str:
    """Returns a one-line message: what could not be written, where, why, and the remedy."""
    code, message = _errno(error), cause(error)
    why = os.strerror(code) if code else message
    remedy = _REMEDIES.get(code, "look at the disk") + ", then " if code else ""
    room = "" if free is None else f" ({free:,} bytes free there)"
    return (
        f"checkpoint of step {step} could not be written to {final}{room}: {why}; "
        f"its arrays have {size:,} bytes, what was written of it was removed, "
        "and earlier checkpoints are as they were: "
        f"{remedy}start the same command again"
    )


def _errno(error: BaseException | None) -> int:
    """Returns the number of the operating-system error behind `error`, or 0.

    tensorstore includes it in its message.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        if match := re.search(r"os_error_code='(\d+)'", str(error)):
            return int(match[1])
        error = error.__cause__ or error.__context__
    return 0


def free_bytes(path: Path) -> int | None:
    """Returns the free bytes of the file system of `path`, which need not exist, or None if they
    are unknown.
    """
    for existing in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(existing).free
    return None


def cause(error: BaseException) -> str:
    """Returns the message of an error as one line of limited length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " ..."
