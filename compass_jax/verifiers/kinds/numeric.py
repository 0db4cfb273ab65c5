"""Numbers, equal within a tolerance."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from compass_jax.verifiers.base import NOTHING, Example, Kind, complaints, number_in
from compass_jax.verifiers.extract import final_answer, reference
from compass_jax.verifiers.maths.evaluation import as_fraction, constant, is_real
from compass_jax.verifiers.maths.notation import normalised
from compass_jax.verifiers.maths.values import Named, Quantity, is_wordy, readings

MAX_CHARS = 200
MAX_BITS = 1_400  # maximum size of a numerator or denominator: about 400 digits
_TOLERANCE = number_in(0, 1e300, ", 0 or more")
# a number in prose; digits after a letter belong to a unit or a name
_NUMBER = re.compile(
    r"(?<![\w.^{\\])[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)"
    r"(?:\s*(?:\\times|\\cdot|[x*])\s*10\s*\^\s*(?:\{\s*-?\d{1,3}\s*\}|-?\d{1,3}))?"
)


def judge(
    response: str, answer: Any, answer_tag: str, abs_tol: float = 0.0, rel_tol: float = 1e-6
) -> float | Mapping[str, Any]:
    """Returns 1 if |answer - reference| <= max(abs_tol, rel_tol |reference|), computed exactly.
    Words and units around the number are ignored. An answer with two numbers is no answer.
    """
    text = final_answer(response, answer_tag)
    value = None if text is None else value_of(text)
    if value is None:
        return NOTHING
    right = value_of(reference(answer))
    if right is None:
        raise ValueError(f"the reference {answer!r:.100} is no number")
    allowed = max(Fraction(abs_tol), Fraction(rel_tol) * abs(right))
    return float(abs(value - right) <= allowed)


def value_of(text: str) -> Fraction | None:
    """Returns the only number in a text ("about 3.5 km", "1.2e3", "3/4"), or None for no number or
    several.
    """
    if len(text) > MAX_CHARS:
        return None
    text = normalised(text)
    values = [_number_in(value) for value in readings(text)]
    if values[0] is not None or not is_wordy(text):
        return values[0]
    numbers = [mark[0].strip() for mark in _NUMBER.finditer(text)]
    return _number_in(readings(numbers[0])[0]) if len(numbers) == 1 else None


def _number_in(value: Any) -> Fraction | None:
    """Returns the number of a value, regardless of its name and unit."""
    if isinstance(value, Named):
        return _number_in(value.value)
    if not isinstance(value, Quantity) or (value.unit and "compound" in value.unit.words):
        return None
    number = constant(value.nodes[0])
    if number is None or not is_real(number):
        return None
    fraction = as_fraction(number)
    bits = max(fraction.numerator.bit_length(), fraction.denominator.bit_length())
    return fraction if bits <= MAX_BITS else None


KIND = Kind(
    judge,
    "the final answer is a number within `abs_tol` or `rel_tol` of the reference",
    Example({"answer": "9.81", "abs_tol": 0.05}, r"\boxed{9.8} m/s", r"\boxed{9.7} m/s"),
    takes=("abs_tol", "rel_tol"),
    complaint=complaints(abs_tol=_TOLERANCE, rel_tol=_TOLERANCE),
)
