"""This machine's memory: bytes available to processes, and the peak of this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from pathlib import Path

import jax

FREE_SHARE = 0.8  # share of the available memory that a run uses at most by default
CGROUP_LIMITS = ("memory.max", "memory.limit_in_bytes")
CGROUP_USES = ("memory.current", "memory.usage_in_bytes")


def on_cpu() -> bool:
    """Returns whether the devices are a CPU's."""
    return jax.devices()[0].platform == "cpu"


def usable_bytes() -> float:
    """Returns the bytes of one device that a run may use: an accelerator's memory, or a simulated
    CPU device's part of FREE_SHARE of the available memory.
    """
    device = jax.devices()[0]
    stats = device.memory_stats() if not on_cpu() else None
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return FREE_SHARE * available_bytes() / jax.local_device_count()


def available_bytes(root: Path = Path("/")) -> float:
    """Returns the bytes of memory still available to processes: the system's figure, or the room
    under a container's limit if that is smaller.

    Args:
        root: parent of /proc and /sys, for tests.
    """
    system = _meminfo(root) or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float(min([system, *_cgroup_room(root)]))


def return_freed_memory() -> None:
    """Returns this process's freed memory to the operating system, where the C library is glibc.

    Threads that compile or run a program each have an arena, whose freed memory no other thread
    reuses (and allocator.py has this process keep it).
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _meminfo(root: Path) -> int:
    """Returns MemAvailable of /proc/meminfo; 0 where the system has no such file."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else 0


def _cgroup_room(root: Path) -> list[int]:
    """Returns the room under the limits of this process's control groups (versions 1, 2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controllers
        inner = base / path.lstrip("/")
        # In a container its own group is mounted as the root, whatever the path says.
        for folder in {base, inner, *(x for x in inner.parents if x.is_relative_to(base))}:
            limit, used = (_number(folder, names) for names in (CGROUP_LIMITS, CGROUP_USES))
            if limit is not None:
                rooms.append(max(limit - (used or 0) + _reclaimable(folder), 0))
    return rooms


def _number(folder: Path, names: tuple[str, ...]) -> int | None:
    """Returns the number in the first of these files; None where it says "max" or is missing."""
    for name in names:
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _reclaimable(folder: Path) -> int:
    """Returns the page cache that counts as used and is given back on demand."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stats = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(stats.get("inactive_file", stats.get("total_inactive_file", "0")))


def peak_bytes() -> float:
    """Returns this process's peak memory: the accelerator's, else resident memory."""
    device = jax.devices()[0]
    stats = device.memory_stats() if not on_cpu() else None
    if stats and "peak_bytes_in_use" in stats:
        return float(stats["peak_bytes_in_use"])
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
