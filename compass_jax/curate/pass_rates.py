"""What the counts of a filter tell of groups that are not rolled out yet.

Where most prompts are hard, one that came out right in 1 of 8 samples is more often one of 5% than
one of 30%: to take 1/8 for its pass rate, after the same samples chose the prompt because they
varied, promises too much. Here the pass rates have a distribution of unknown form (a Dirichlet
prior over a grid; Ferguson, Annals of Statistics 1973), every prompt's own counts weigh its place
in it, and both are drawn together (Gibbs sampling): what eight samples cannot tell is in the
interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

GRID = np.sin(np.linspace(0, math.pi / 2, 61)) ** 2  # pass rates, 0 and 1 among them
PRIOR = 2.0  # prompts that the prior is worth, spread evenly over the grid
SWEEPS, FIRST = 1500, 200  # of Gibbs sampling; the first ones are not counted
HELD = 0.9  # of the interval


class UniformShare(NamedTuple):
    """The share of the kept prompts' next groups that come out uniform: its expectation, and an
    interval that holds what is measured in 9 of 10 cases.
    """

    mean: float
    low: float
    high: float


def uniform_shares(
    right: Sequence[int], known: Sequence[int], kept: Sequence[bool], sizes: Sequence[int]
) -> dict[int, UniformShare]:
    """For each group size n the share of uniform groups, all right or all wrong, where each prompt
    that is kept is rolled out in one fresh group of n samples. The same counts give the same
    numbers. Empty where nothing is kept.

    Args:
        right: right answers of each prompt.
        known: answers of each prompt that were judged; 0 tells nothing of it.
        kept: which prompts are kept, whatever their counts.
        sizes: the group sizes n.
    """
    cells, counts = np.unique(np.stack([right, known, kept]), axis=1, return_counts=True)
    chosen = cells[2].astype(bool)
    if not chosen.any():
        return {}
    rng = np.random.default_rng(0)
    hits, misses = cells[0][:, None], (cells[1] - cells[0])[:, None]
    logs = np.log(np.maximum(GRID, 1e-300)), np.log(np.maximum(1 - GRID, 1e-300))
    likelihood = hits * logs[0] + misses * logs[1]  # [cells, grid]
    likelihood = np.exp(likelihood - likelihood.max(1, keepdims=True))
    uniform = np.stack([GRID**n + (1 - GRID) ** n for n in sizes])  # [sizes, grid]
    expected, drawn = [], []
    placed = np.zeros(len(GRID))  # prompts at each pass rate
    for sweep in range(SWEEPS):
        posterior = likelihood * (rng.dirichlet(PRIOR / len(GRID) + placed) + 1e-12)
        posterior /= posterior.sum(1, keepdims=True)
        found = rng.multinomial(counts, posterior)  # [cells, grid]
        placed = found.sum(0)
        if sweep >= FIRST:
            mine = found[chosen].sum(0)
            expected.append(counts[chosen] @ posterior[chosen] @ uniform.T)
            drawn.append(rng.binomial(mine, np.clip(uniform, 0, 1)).sum(1))
    total = counts[chosen].sum()
    mean = np.mean(expected, 0) / total
    low, high = np.quantile(np.stack(drawn), [(1 - HELD) / 2, (1 + HELD) / 2], axis=0) / total
    return {
        n: UniformShare(float(mean[i]), float(low[i]), float(high[i])) for i, n in enumerate(sizes)
    }
