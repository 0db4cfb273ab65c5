"""Penalties of reward shaping for a single response, in [0, 1]. rl/shaping.py applies them to
groups.
"""

from __future__ import annotations

from collections.abc import Iterable


def repetition_frac(tokens: Iterable[int], ngram: int) -> float:
    """Returns the share of n-grams that repeat an earlier one; 0 for a short response."""
    if ngram < 1:
        raise ValueError(f"repetition_frac: ngram = {ngram} must be positive")
    ids = [int(t) for t in tokens]
    grams = [tuple(ids[i : i + ngram]) for i in range(len(ids) - ngram + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
