"""A pattern."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from compass_jax.verifiers.base import Example, Kind


def judge(response: str, pattern: str) -> float:
    """1 where the pattern is found in the response."""
    return float(re.search(pattern, response) is not None)


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
