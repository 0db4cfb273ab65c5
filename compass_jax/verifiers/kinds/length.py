"""Short responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compass_jax.verifiers.base import UNKNOWN_STEPS, Example, Kind


def judge(response: str, most_chars: int, free_chars: int | None = None) -> float:
    """1 up to `free_chars` characters, down to 0 at `most_chars` in a straight line; without
    `free_chars` 1 up to `most_chars` and 0 above.
    """
    free = most_chars if free_chars is None else free_chars
    if len(response) <= free:
        return 1.0
    return (
        max(0.0, (most_chars - len(response)) / (most_chars - free)) if most_chars > free else 0.0
    )


def _steps(given: Mapping[str, Any]) -> int:
    if "most_chars" not in given:
        return UNKNOWN_STEPS  # every row may have its own
    return max(1, given["most_chars"] - given.get("free_chars", given["most_chars"]))


def _complaint(given: Mapping[str, Any]) -> str:
    if "most_chars" not in given:
        return ""
    most, free = given["most_chars"], given.get("free_chars", given["most_chars"])
    numbers = all(isinstance(x, int) and not isinstance(x, bool) for x in (most, free))
    if numbers and 0 <= free <= most and most > 0:
        return ""
    return (
        f"most_chars = {most!r:.40} and free_chars = {free!r:.40} must be whole numbers,"
        " free_chars at most most_chars"
    )


KIND = Kind(
    judge,
    "the response has at most `free_chars` characters, down to 0 at `most_chars`",
    Example({"most_chars": 10, "free_chars": 4}, "four", "ten or more"),
    answer=False,
    takes=("most_chars", "free_chars"),
    looks_for="",
    steps=_steps,
    complaint=_complaint,
)
