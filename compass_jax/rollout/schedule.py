"""The order in which requests enter the slots. Pure functions of numbers on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np


def longest_first(expected: Sequence[float]) -> list[int]:
    """Returns indices by falling expected length, ties in order (longest processing time first).
    NaN (an unknown length) counts as the mean of the known lengths.
    """
    lengths = np.asarray(expected, np.float64)
    is_nan = np.isnan(lengths)
    if is_nan.all():
        return list(range(len(lengths)))
    filled = np.where(is_nan, lengths[~is_nan].mean(), lengths)
    return np.argsort(-filled, kind="stable").tolist()


def evenly(free: Sequence[int], slots: int, groups: int) -> list[int]:
    """Returns the free slots in the order in which they are filled: the device with the most free
    slots first, of `groups` devices with consecutive slots.

    If the longest requests come first, neighbours in the queue have similar lengths, so every
    device gets its share of the long ones.
    """
    size = slots // groups
    waiting = [deque(sorted(slot for slot in free if slot // size == g)) for g in range(groups)]
    out: list[int] = []
    while any(waiting):
        out.append(max(waiting, key=len).popleft())
    return out
