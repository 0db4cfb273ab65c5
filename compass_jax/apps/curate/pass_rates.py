"""Predicts the share of uniform groups among the prompts that a difficulty filter keeps.

If most prompts are hard, a prompt with 1 correct answer in 8 is more likely to have a pass rate of
5% than of 30%. Using 1/8 as its pass rate would be too optimistic, because the same samples
selected the prompt for their variance. Here the pass rates follow an unknown distribution (a
Dirichlet prior over a grid; Ferguson, Annals of Statistics 1973), and each prompt's counts update
its position in it. Gibbs sampling draws both together, so the interval includes the uncertainty of
a few samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

GRID = np.sin(np.linspace(0, math.pi / 2, 61)) ** 2  # pass rates, including 0 and 1
PRIOR = 2.0  # weight of the prior in prompts, spread evenly over the grid
SWEEPS, FIRST = 1500, 200  # Gibbs sampling: total sweeps, burn-in sweeps
HELD = 0.9  # coverage of the interval


class UniformShare(NamedTuple):
    """The expected share of uniform groups of the kept prompts, and its 90% interval."""

    mean: float
    low: float
    high: float


def uniform_shares(
    right: Sequence[int], known: Sequence[int], selected: Sequence[bool], sizes: Sequence[int]
) -> dict[int, UniformShare]:
    """Returns the predicted share of uniform groups (all correct or all wrong) for each group size
    n.

    Each kept prompt is rolled out in one fresh group of n samples. The same counts give the same
    numbers. The result is empty if no prompt is kept.

    Args:
        right: number of correct answers of each prompt.
        known: number of judged answers of each prompt; 0 carries no information.
        selected: whether each prompt is kept.
        sizes: the group sizes n.
    """
    cells, counts = np.unique(np.stack([right, known, selected]), axis=1, return_counts=True)
    is_kept = cells[2].astype(bool)
    if not is_kept.any():
        return {}
    rng = np.random.default_rng(0)
    hits, misses = cells[0][:, None], (cells[1] - cells[0])[:, None]
    logs = np.log(np.maximum(GRID, 1e-300)), np.log(np.maximum(1 - GRID, 1e-300))
    likelihood = hits * logs[0] + misses * logs[1]  # [cells, grid]
    likelihood = np.exp(likelihood - likelihood.max(1, keepdims=True))
    uniform = np.stack([GRID**n + (1 - GRID) ** n for n in sizes])  # [sizes, grid]
    expected, drawn = [], []
    occupancy = np.zeros(len(GRID))  # prompts at each pass rate
    for sweep in range(SWEEPS):
        posterior = likelihood * (rng.dirichlet(PRIOR / len(GRID) + occupancy) + 1e-12)
        posterior /= posterior.sum(1, keepdims=True)
        assigned = rng.multinomial(counts, posterior)  # [cells, grid]
        occupancy = assigned.sum(0)
        if sweep >= FIRST:
            kept_assigned = assigned[is_kept].sum(0)
            expected.append(counts[is_kept] @ posterior[is_kept] @ uniform.T)
            drawn.append(rng.binomial(kept_assigned, np.clip(uniform, 0, 1)).sum(1))
    total = counts[is_kept].sum()
    mean = np.mean(expected, 0) / total
    low, high = np.quantile(np.stack(drawn), [(1 - HELD) / 2, (1 + HELD) / 2], axis=0) / total
    return {
        n: UniformShare(float(mean[i]), float(low[i]), float(high[i])) for i, n in enumerate(sizes)
    }
