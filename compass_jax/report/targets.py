"""The cost of a run until its held-out accuracy reaches a target, and stays there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SMOOTHED = 3  # number of evaluations in a mean

Curve = Sequence[Sequence[float]]  # points (cost, accuracy); the first is the start, of cost 0


class Reached(NamedTuple):
    """The cost at which a curve stays at or above a target; the whole cost where it never does."""

    cost: float
    reached: bool


def smoothed(curve: Curve) -> list[list[float]]:
    """Returns the curve with the mean of each accuracy and up to two before it. The start stays out
    of the means of later points.
    """
    accuracy = [point[1] for point in curve]
    means = [
        float(np.mean(accuracy[max(1, i - SMOOTHED + 1) : i + 1])) if i else accuracy[0]
        for i in range(len(curve))
    ]
    return [[cost, mean] for (cost, _), mean in zip(curve, means, strict=True)]


def target_of(curve: Curve, gain: float) -> float | None:
    """Returns the accuracy with a share `gain` of what the smoothed curve has gained at its end;
    None where it has gained nothing.
    """
    means = smoothed(curve)
    start, end = means[0][1], means[-1][1]
    return start + gain * (end - start) if end > start else None


def cost_to_stay(curve: Curve, target: float) -> Reached:
    """Returns the cost from which the smoothed curve stays at or above `target`, linear between two
    points.
    """
    points = smoothed(curve)
    below = [i for i, (_, accuracy) in enumerate(points) if accuracy < target]
    if not below:
        return Reached(points[0][0], True)
    last = below[-1]
    if last == len(points) - 1:
        return Reached(points[-1][0], False)
    (c0, a0), (c1, a1) = points[last], points[last + 1]
    return Reached(c0 + (target - a0) / (a1 - a0) * (c1 - c0), True)
