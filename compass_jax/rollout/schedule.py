"""In which order requests enter the slots, from the lengths that are expected of them. Pure
functions of numbers on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np


def longest_first(expected: Sequence[float]) -> list[int]:
    """Indices by falling expected length, ties in their order (longest processing time first: what
    ends last should not start last).

    NaN, nothing expected, counts as the mean of the others: such a request is neither held back nor
    preferred.
    """
    lengths = np.asarray(expected, np.float64)
    unknown = np.isnan(lengths)
    if unknown.all():
        return list(range(len(lengths)))
    filled = np.where(unknown, lengths[~unknown].mean(), lengths)
    return np.argsort(-filled, kind="stable").tolist()


def evenly(free: Sequence[int], slots: int, groups: int) -> list[int]:
    """Free slots in the order in which they are to be filled, so that `groups` devices with as many
    slots each keep as many free ones.

    Device g has slots g * slots / groups and those behind it. Where longest come first, neighbours
    in the queue are alike in length, and every device gets its share of them.
    """
    size = slots // groups
    waiting = [deque(sorted(slot for slot in free if slot // size == g)) for g in range(groups)]
    out: list[int] = []
    while any(waiting):
        out.append(max(waiting, key=len).popleft())
    return out
