"""Penalties of reward shaping for a single response, in [0, 1]. rl/shaping.py applies them to
groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def repetition_frac(tokens: Sequence[int] | np.ndarray, ngram: int) -> float:
    """Returns the share of n-grams that repeat an earlier one; 0 for a short response."""
    if ngram < 1:
        raise ValueError(f"repetition_frac: ngram = {ngram} must be positive")
    ids = np.asarray(tokens, np.int64)
    count = len(ids) - ngram + 1
    if count < 1:
        return 0.0
    # A token's number is one of its places, so that four of them fit into an integer.
    place = np.empty(ids.max() + 1, np.int64)
    place[ids] = np.arange(len(ids))
    ids = place[ids]
    # Equal n-grams have equal numbers, which are below `bound`.
    grams, bound = ids[:count], len(ids)
    for i in range(1, ngram):
        if bound * len(ids) > np.iinfo(np.int64).max:
            different, grams = np.unique(grams, return_inverse=True)
            bound = len(different)
        grams, bound = grams * len(ids) + ids[i : i + count], bound * len(ids)
    return 1.0 - (1 + np.count_nonzero(np.diff(np.sort(grams)))) / count
