"""The C library's allocator. Imports nothing slow: it acts before the first array."""

from __future__ import annotations

import contextlib
import ctypes
import sys

# of mallopt(3) in glibc: name, value
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
OPTIONS = ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**28))


def tune_allocator() -> None:
    """Makes this process keep its freed memory, where the C library is glibc.

    XLA's CPU backend allocates a step's temporaries anew at every call. When glibc returns them in
    between, the kernel spends up to half of a training step on page faults. The number of arenas is
    not limited: with one, the compiler's threads wait for each other (a cold start takes 1.6 times
    as long), and a step is not faster.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError, OSError):
        for option, value in OPTIONS:
            ctypes.CDLL(None).mallopt(option, value)
