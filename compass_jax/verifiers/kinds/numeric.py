"""Numbers, equal within a tolerance."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from compass_jax.verifiers.answers import exact
from compass_jax.verifiers.base import NOTHING, Example, Kind
from compass_jax.verifiers.extract import final_answer, reference

_MOST_CHARS = 200
_MOST_EXPONENT = 400
# a decimal with an exponent in E's or LaTeX's notation; what stands around it is a unit
_NUMBER = re.compile(
    r"[-+\u2212]?(?:\d[\d,]*\.?\d*|\.\d+)"
    r"(?:[eE]([-+]?\d{1,3})|\s*(?:\\times|\\cdot|[x*×])\s*10\^\{?(-?\d{1,3})\}?)?"
)


def judge(
    response: str, answer: Any, answer_tag: str, abs_tol: float = 0.0, rel_tol: float = 1e-6
) -> float | Mapping[str, Any]:
    """1 where |answer - reference| <= max(abs_tol, rel_tol |reference|), exactly. Words and
    units around a number do not count; an answer with two numbers is none.
    """
    found = final_answer(response, answer_tag)
    value = None if found is None else value_of(found)
    if value is None:
        return NOTHING
    wanted = value_of(reference(answer))
    if wanted is None:
        raise ValueError(f"the reference {answer!r:.100} is no number")
    allowed = max(Fraction(abs_tol), Fraction(rel_tol) * abs(wanted))
    return float(abs(value - wanted) <= allowed)


def value_of(text: str) -> Fraction | None:
    """The one number in a text ("about 3.5 km", "1,200", "1.2e3", "3/4"), None for none or two."""
    if len(text) > _MOST_CHARS:
        return None
    if plain := exact(text):
        return plain[1]
    found = list(_NUMBER.finditer(text))
    if len(found) != 1:
        return None
    (mark,) = found
    exponent = int(mark[1] or mark[2] or 0)
    digits = re.split(r"[eE]|\s*(?:\\times|\\cdot|[x*×])", mark[0].replace("\u2212", "-"))[0]
    if abs(exponent) > _MOST_EXPONENT:
        return None
    return Fraction(digits.replace(",", "")) * Fraction(10) ** exponent


def _complaint(given: Mapping[str, Any]) -> str:
    for name in ("abs_tol", "rel_tol"):
        value = given.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300:
            return f"{name} = {value!r:.40} must be a number, 0 or more"
    return ""


KIND = Kind(
    judge,
    "the final answer is a number within `abs_tol` or `rel_tol` of the reference",
    Example({"answer": "9.81", "abs_tol": 0.05}, r"\boxed{9.8} m/s", r"\boxed{9.7} m/s"),
    takes=("abs_tol", "rel_tol"),
    complaint=_complaint,
)
