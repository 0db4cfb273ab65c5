"""A pattern."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from compass_jax.verifiers.base import Example, Kind
from compass_jax.verifiers.extract import visible


def judge(response: str, pattern: str) -> float:
    """Returns 1 where the pattern is found in the response.

    Thoughts are searched only by a pattern that mentions them ("think").
    """
    text = response if "think" in pattern else visible(response)
    return float(re.search(pattern, text) is not None)


def _complaint(given: Mapping[str, Any]) -> str:
    try:
        re.compile(given.get("pattern", ""))
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        return f"pattern = {given['pattern']!r:.100}: {error}"
    return ""


KIND = Kind(
    judge,
    "the pattern is found in the response",
    Example({"pattern": r"\bParis\b"}, "It is Paris.", "It is Parisian."),
    answer=False,
    takes=("pattern",),
    looks_for="",
    may_hang=True,  # a pattern can take for ever
    complaint=_complaint,
)
