"""JSON, by value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compass_jax.rewards.extract import json_text
from compass_jax.rewards.verifiers.base import NOTHING, Example, Kind
from compass_jax.untrusted import UntrustedError, parse_json


def judge(response: str, answer_tag: str, answer: Any = None) -> Mapping[str, Any]:
    """1 for JSON that equals the reference (JSON as text, or a value), or for any JSON where there
    is no reference.
    """
    try:
        found = parse_json(json_text(response, answer_tag), "the answer")
    except UntrustedError:
        return NOTHING
    if answer is None:
        return {"reward": 1.0}
    wanted = parse_json(answer, "the reference") if isinstance(answer, str) else answer
    return {"reward": float(_equal(found, wanted))}


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are the same JSON: true is not 1, and 1 is 1.0."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    return type(a) is type(b) and a == b


KIND = Kind(
    judge,
    "the answer is JSON that equals the reference, or any JSON where the row has none",
    Example({"answer": '{"a": [1, true]}'}, '{"a": [1.0, true]}', '{"a": [1, 1]}'),
    answer=False,
    looks_for="JSON: {last}, else in a block between ``` marks, else all of it",
)
