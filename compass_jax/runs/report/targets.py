"""Smoothed curves of held-out accuracy, and the cost at which they reach a target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GRID_POINTS = 1001  # of a curve of `means_over`

Curve = Sequence[Sequence[float]]  # points (cost, accuracy); the first is the start, of cost 0


def means_over(curve: Curve, width: float) -> list[list[float]]:
    """Returns a curve of GRID_POINTS points, each the mean over `width` of cost around it of the
    curve that is linear between its points; less at the ends, where half of that is missing.
    """
    costs, accuracy = np.array(curve, float).T
    if costs[-1] <= 0:
        return [[float(costs[0]), float(accuracy[0])]]
    grid = np.linspace(0, costs[-1], GRID_POINTS)
    half = max(1, round(width / 2 / (grid[1] - grid[0])))
    fine = np.interp(grid, costs, accuracy)
    means = [float(fine[max(0, i - half) : i + half + 1].mean()) for i in range(GRID_POINTS)]
    return [[float(cost), mean] for cost, mean in zip(grid, means, strict=True)]


def first_passage(means: Curve, target: float) -> float | None:
    """Returns the cost at which a smoothed curve is first at or above `target`, linear between two
    points; None if it never is.
    """
    place = next((i for i, (_, accuracy) in enumerate(means) if accuracy >= target), None)
    if not place:
        return None if place is None else means[0][0]
    (c0, a0), (c1, a1) = means[place - 1 : place + 1]
    return c0 + (target - a0) / (a1 - a0) * (c1 - c0)
