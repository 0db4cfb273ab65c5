"""In which order requests enter the slots, from the lengths that are expected of them. Pure functions of numbers on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def longest_first(expected: Sequence[float]) -> list[int]:
    """Indices by falling expected length, ties in their order (longest processing time first: what ends last should not start last).

    NaN, nothing expected, counts as the mean of the others: such a request is neither held back nor preferred.
    """
    lengths = np.asarray(expected, np.float64)
    unknown = np.isnan(lengths)
    if unknown.all():
        return list(range(len(lengths)))
    filled = np.where(unknown, lengths[~unknown].mean(), lengths)
    return np.argsort(-filled, kind="stable").tolist()
