"""A judge's verdict on a pair of answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compass_jax.verifiers.base import NOTHING, Example, Kind
from compass_jax.verifiers.extract import reference, visible
from compass_jax.verifiers.judge import verdict


def judge(response: str, answer: Any) -> float | Mapping[str, Any]:
    """Returns 1 where the last line with a verdict says the reference's: Better, Tie or Worse.

    Raises ValueError for a reference that is none of them.
    """
    wanted = verdict(reference(answer))
    if wanted is None:
        raise ValueError(f"the reference {answer!r:.40} is no verdict; write Better, Tie or Worse")
    found = verdict(visible(response))
    return NOTHING if found is None else float(found == wanted)


KIND = Kind(
    judge,
    "the last verdict of the response, Better, Tie or Worse, is the reference",
    Example({"answer": "Tie"}, "Both say the same.\nTie", "The candidate says more.\nBetter"),
    looks_for="the last line with Better, Tie or Worse",
)
