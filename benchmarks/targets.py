"""The cost of a run until its held-out accuracy reaches a target, and stays there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from compass_jax.runs.report.targets import Curve

GAIN = 0.9  # share of a baseline's gain that makes a target
EVALUATIONS = 3  # number of evaluations in a mean of `means_of_evaluations`


class Reached(NamedTuple):
    """The cost at which a curve stays at or above a target; the whole cost where it never does."""

    cost: float
    reached: bool


def means_of_evaluations(curve: Curve) -> list[list[float]]:
    """Returns the curve with the mean of each accuracy and up to two before it. The start stays out
    of the means of later points.

    The means lag behind by a cost that grows with the distance of the evaluations.
    """
    accuracy = [point[1] for point in curve]
    means = [
        float(np.mean(accuracy[max(1, i - EVALUATIONS + 1) : i + 1])) if i else accuracy[0]
        for i in range(len(curve))
    ]
    return [[cost, mean] for (cost, _), mean in zip(curve, means, strict=True)]


def target_of(means: Curve) -> float | None:
    """Returns the accuracy at which a smoothed curve has the share GAIN of its whole gain; None for
    a curve without a gain.
    """
    start, end = means[0][1], means[-1][1]
    return start + GAIN * (end - start) if end > start else None


def cost_to_stay(means: Curve, target: float) -> Reached:
    """Returns the cost from which a smoothed curve stays at or above `target`, linear between two
    points.
    """
    below = [i for i, (_, accuracy) in enumerate(means) if accuracy < target]
    if not below:
        return Reached(means[0][0], True)
    last = below[-1]
    if last == len(means) - 1:
        return Reached(means[-1][0], False)
    (c0, a0), (c1, a1) = means[last], means[last + 1]
    return Reached(c0 + (target - a0) / (a1 - a0) * (c1 - c0), True)
