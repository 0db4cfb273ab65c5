"""Estimators of accuracy with their uncertainty: avg@k, pass@k, maj@k, and the difference of two
evaluations of the same prompts.

They count `right` and `known` samples of each prompt; samples with an unknown score are left out.
Prompts are the unit of resampling: samples of one prompt are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
_Z = 1.959963984540054  # the normal quantile of CONFIDENCE, two-sided
RESAMPLES = 2000
_ENTRIES = 2**22  # entries of the table of resampled prompts in memory at a time


def pass_at_k(right: int, known: int, k: int) -> float:
    """Computes the probability that k of a prompt's `known` samples, drawn without replacement,
    include a right one: 1 - C(known - right, k) / C(known, k) (arXiv 2107.03374v2, eq. 1). NaN for
    fewer than k samples.
    """
    if known < k:
        return math.nan
    wrong = known - right
    return 1.0 - math.prod((wrong - i) / (known - i) for i in range(k)) if wrong >= k else 1.0


def pass_counts(k: int) -> list[int]:
    """Returns the k' at which pass@k' is reported for k samples: the powers of two up to k,
    and k.
    """
    return sorted({*(2**i for i in range(k.bit_length())), k})


def maj_at_k(votes: Sequence[Hashable | None], right: Sequence[bool]) -> float:
    """Computes the expected accuracy of the most frequent answer among a prompt's samples
    (self-consistency, arXiv 2203.11171v4): the mean over the answers tied for it, each with the
    share of its samples that are right. 0 where no sample has an answer.

    Args:
        votes: the answer of each known sample, None without an answer.
    """
    by_answer: dict[Hashable, list[bool]] = {}
    for vote, one in zip(votes, right, strict=True):
        if vote is not None:
            by_answer.setdefault(vote, []).append(one)
    most = max(map(len, by_answer.values()), default=0)
    tied = [np.mean(samples) for samples in by_answer.values() if len(samples) == most]
    return float(np.mean(tied)) if tied else 0.0


class Estimate(NamedTuple):
    """A mean with its uncertainty; NaN for an undefined number."""

    mean: float
    se: float
    low: float
    high: float


UNDEFINED = Estimate(math.nan, math.nan, math.nan, math.nan)


def clustered(
    sums: np.ndarray, counts: np.ndarray, seed: int, support: tuple[float, float] = (0.0, 1.0)
) -> Estimate:
    """Computes the mean over all samples, its standard error clustered by prompt (arXiv
    2411.00640v1, eq. 4, with the factor g / (g - 1)), and its 95% interval: the percentile
    bootstrap over prompts.

    The bootstrap has no width where all prompts have the same mean, for example where none is
    solved or no prompt differs between two evaluations. Other prompts may differ, up to the share
    that Wilson's interval permits after none of g did, and have any value of `support`. One prompt
    has no error.

    Args:
        sums: float [g], the sum of each prompt's values.
        counts: int [g], the number of each prompt's values; prompts without values are left out.
        seed: of the bootstrap.
        support: the range of a value.
    """
    has_values = counts > 0
    sums, counts = sums[has_values].astype(float), counts[has_values].astype(float)
    g = len(sums)
    if not g:
        return UNDEFINED
    mean = float(sums.sum() / counts.sum())
    if g == 1:
        return Estimate(mean, math.nan, *support)
    residuals = sums - mean * counts
    se = float(np.sqrt((residuals**2).sum() * g / (g - 1)) / counts.sum())
    if np.allclose(residuals, 0, atol=1e-9):
        unseen = wilson(0.0, g)[1]
        return Estimate(mean, se, *(mean + unseen * (end - mean) for end in support))
    means = np.concatenate(list(_resampled(sums, counts, seed)))
    tail = 50 * (1 - CONFIDENCE)  # per cent on each side
    return Estimate(mean, se, *map(float, np.percentile(means, (tail, 100 - tail))))


def _resampled(sums: np.ndarray, counts: np.ndarray, seed: int):
    """Yields means of RESAMPLES draws of g prompts, with replacement."""
    rng, g = np.random.default_rng(seed), len(sums)
    at_once = max(1, _ENTRIES // g)
    for first in range(0, RESAMPLES, at_once):
        rows = min(at_once, RESAMPLES - first)
        # [rows, g]: how often each resample has each prompt, which is all that a mean depends on.
        times = rng.multinomial(g, np.full(g, 1 / g), rows).astype(float)
        yield (times @ sums) / (times @ counts)


def wilson(share: float, trials: int) -> tuple[float, float]:
    """Computes Wilson's 95% interval of a share of independent trials (Wilson 1927): the shares
    that a normal test would not reject. (0, 1) without trials.
    """
    if not trials:
        return 0.0, 1.0
    z2 = _Z**2 / trials
    middle = (share + z2 / 2) / (1 + z2)
    width = _Z / (1 + z2) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials))
    low, high = max(0.0, middle - width), min(1.0, middle + width)
    return low if share > 0 else 0.0, high if share < 1 else 1.0  # exact up to rounding


def sign_test(only_first: int, only_second: int) -> float:
    """Computes McNemar's exact test, two-sided: the probability that pairs with one right side
    split at least as unevenly as these, if both sides are equally likely. 1 without such pairs.
    """
    n, few = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(n, i) for i in range(few + 1))
    return min(1.0, 2 * tail / 2**n)  # of integers: exact for any n
