"""Failure signatures of RL in the numbers of the latest steps: a reward that rises while its gold
label falls, a reward that stands still, and a sudden spike of the loss.

A window is an array `[... n]` of one number a step, the oldest first, in float64. The definitions
are ours.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import special

STAGNANT = 0.05  # share of the reward's range that a reward may at most have risen over a window
CONFIDENCE = 0.95  # of the statement that it has not risen further
SPIKE = 20.0  # distance of a loss from the window's median, in median distances


class Trend(NamedTuple):
    """The least-squares line through a window: its slope per step and the slope's standard error,
    with n - 2 degrees of freedom.
    """

    slope: np.ndarray  # [...]
    error: np.ndarray  # [...]


def trend(values: np.ndarray) -> Trend:
    """Returns the line through `values` [... n] at equal distances, n of at least 3.

        slope = sum_i x_i y_i / S      error^2 = sum_i (y_i - mean(y) - slope x_i)^2 / ((n - 2) S)

    with x_i the steps' distances from their mean and S = sum_i x_i^2.
    """
    values = np.asarray(values, np.float64)
    count = values.shape[-1]
    x = np.arange(count) - (count - 1) / 2
    squares = np.sum(x**2)
    centred = values - values.mean(-1, keepdims=True)
    slope = np.asarray(centred @ x / squares)
    residual = centred - slope[..., None] * x
    return Trend(slope, np.asarray(np.sqrt(np.sum(residual**2, -1) / ((count - 2) * squares))))


def fall_p(values: np.ndarray) -> np.ndarray:
    """Returns the p-value [...] of a falling line in `values` [... n]: the probability of a line
    that falls as clearly where the truth does not fall and the steps' noise is independent and
    normal (one-sided t-test with n - 2 degrees of freedom). It is 1 where the line does not fall.
    """
    slope, error = trend(values)
    # An exact line has no error: t = -inf gives a falling one a p-value of 0.
    t = np.divide(slope, error, out=np.full_like(slope, -np.inf), where=error > 0)
    return np.where(slope < 0, special.stdtr(values.shape[-1] - 2, t), 1.0)


def parting_p(reward: np.ndarray, gold: np.ndarray) -> np.ndarray:
    """Returns the p-value [...] of "reward up, gold down" over windows [... n]: that of a falling
    gold label where the reward's line rises, else 1.

    Where the gold label does not truly fall, a test at level a is a false alarm with probability
    a at most, whatever the reward does.
    """
    return np.where(trend(reward).slope > 0, fall_p(gold), 1.0)


def rise_bound(reward: np.ndarray) -> np.ndarray:
    """Returns the upper bound [...], at CONFIDENCE, of the rise of the reward's line over the
    windows [... n].
    """
    slope, error = trend(reward)
    # The slope is per step, and n steps have n - 1 intervals.
    count = reward.shape[-1]
    return np.asarray((slope + special.stdtrit(count - 2, CONFIDENCE) * error) * (count - 1))


def gain_bound(gains: np.ndarray) -> float:
    """Returns the upper bound, at CONFIDENCE, of the mean of paired differences [n]."""
    error = np.std(gains, ddof=1) / math.sqrt(gains.size)
    return float(np.mean(gains) + special.stdtrit(gains.size - 1, CONFIDENCE) * error)


def spike_size(losses: np.ndarray) -> float:
    """Returns how far the last loss of a window [n] is from the median of those before it, in their
    median distance from this median; 0 where they do not differ.
    """
    *before, last = np.asarray(losses, np.float64)
    middle = np.median(before)
    distance = np.median(np.abs(before - middle))
    return float(abs(last - middle) / distance) if distance else 0.0
