"""Equal texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compass_jax.verifiers.base import NOTHING, Example, Kind
from compass_jax.verifiers.extract import final_answer, reference


def judge(response: str, answer: Any, answer_tag: str) -> float | Mapping[str, Any]:
    """Returns 1 where the final answer is the reference, character by character.

    A run of white space counts as one blank.
    """
    found = final_answer(response, answer_tag)
    if found is None:
        return NOTHING
    return float(" ".join(found.split()) == " ".join(reference(answer).split()))


KIND = Kind(
    judge,
    "the final answer is the reference, character by character",
    Example({"answer": "New York"}, "<answer>New  York</answer>", "<answer>York</answer>"),
)
