"""Multiple choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compass_jax.rewards.extract import chosen_letter, reference
from compass_jax.rewards.verifiers.base import IN_ANSWER, NOTHING, Example, Kind


def judge(
    response: str, answer: Any, answer_tag: str, choices: str = "ABCDEFGHIJ"
) -> float | Mapping[str, Any]:
    """1 where the chosen letter is the reference: a letter, or its number counted from 0."""
    letters = choices.upper()
    found = chosen_letter(response, answer_tag, letters)
    if found is None:
        return NOTHING
    if isinstance(answer, int) and not isinstance(answer, bool):
        return float(0 <= answer < len(letters) and found == letters[answer])
    return float(found == reference(answer).strip().strip("().").upper())


KIND = Kind(
    judge,
    "the chosen letter is the reference",
    Example({"answer": "B"}, "The answer is (B).", "The answer is (C)."),
    takes=("choices",),
    looks_for=IN_ANSWER + "; else a letter after 'the answer is'",
)
