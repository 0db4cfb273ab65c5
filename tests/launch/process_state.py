"""Looks at processes that are not this one's children."""

import time
from collections.abc import Callable
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process runs: one that ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits until `condition` holds; fails where it does not come about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)
