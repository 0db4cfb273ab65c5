"""Mathematical answers, compared by value."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from compass_jax.verifiers.answers import is_program
from compass_jax.verifiers.base import NOTHING, Example, Kind
from compass_jax.verifiers.extract import boxed, final_answer, last_formula, reference, stated
from compass_jax.verifiers.maths.equality import same_answer

MAX_CHARS = 600  # maximum length of a formula passed to Math-Verify
SECONDS = 2  # timeout of each step of Math-Verify; a timeout is a wrong answer
_PROSE = re.compile(r"[\s*\"']*[A-Za-z]{2,}(?:[\s:,']+[A-Za-z]+|\s*(?::|\$|\\[(\[]))")
_LONG_NUMBER = re.compile(r"\d{20}")
_LARGE_POWER = re.compile(
    r"\^\s*(?:\{?\s*-?\d{5}|\{[^{}]*\^|-?\w+\s*\^)|[)}]\s*\^\s*\{?\d{3}|!\s*[!)}^]*!|\d{5}\s*!"
)
_LARGE_BOUND = re.compile(r"\\(?:sum|prod)[^\\]*?\^\s*(?:\{?\s*\d{5}|\{[^{}]*[\^!])")


def judge(response: str, answer: Any, answer_tag: str) -> float | Mapping[str, Any]:
    r"""Returns 1 if the final answer is the reference.

    If the reference contains #### or \boxed{...}, the text after the mark or in the box is used.
    """
    text = _final_answer(response, answer_tag)
    return NOTHING if text is None else math_score(text, _reference(answer))


def at_once(response: str, answer: Any, answer_tag: str) -> float | Mapping[str, Any] | None:
    """Returns the result of `judge`, or None if it needs Math-Verify."""
    text = _final_answer(response, answer_tag)
    return NOTHING if text is None else math_decided(text, _reference(answer))


def _final_answer(response: str, tag: str) -> str | None:
    """Returns the final answer. With an empty tag, the last formula of a sentence is its answer."""
    text = final_answer(response, tag)
    if tag or text is None:
        return text
    text = final_answer(text, "answer") or text
    prose = _PROSE.match(text) and not is_program(text)
    return (last_formula(text) or text) if prose else text


def _reference(answer: Any) -> str:
    text = reference(answer)
    return boxed(text + "}") or boxed(text) or stated(text) or text


def math_decided(answer: str, reference: str) -> float | None:
    """Returns 1.0 if `answer` is `reference`, 0.0 if not, None if Math-Verify must decide."""
    is_equal = same_answer(reference, answer)
    if is_equal is None and (_is_large(answer) or _is_large(reference)):
        return 0.0
    return None if is_equal is None else float(is_equal)


def _is_large(text: str) -> bool:
    """Returns whether a formula is too large for Math-Verify to compute in time."""
    marks = (_LONG_NUMBER, _LARGE_POWER, _LARGE_BOUND)
    return len(text) > MAX_CHARS or any(mark.search(text) for mark in marks)


def math_score(answer: str, reference: str) -> float:
    """Returns 1.0 if `answer` is `reference`, else 0.0."""
    decided = math_decided(answer, reference)
    if decided is not None:
        return decided
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    formulas = (math_verify.LatexExtractionConfig(),)
    gold, value = (
        math_verify.parse(_add_delimiters(text), formulas, parsing_timeout=SECONDS)
        for text in (reference, answer)
    )
    if not gold or not value:
        return 0.0
    return float(math_verify.verify(gold, value, timeout_seconds=SECONDS))


def _add_delimiters(text: str) -> str:
    """Returns a formula with the delimiters that Math-Verify expects."""
    return text if any(mark in text for mark in ("$", "\\boxed", "\\(", "\\[")) else f"${text}$"


# pairs that fill the cache of Math-Verify's parser before children are forked
WARM = (
    (r"\sum_{k=1}^{n} k", r"\sum_{j=1}^{n} j"),
    (r"\int_0^1 x dx", r"\int_0^1 y^2 dy"),
    (r"\lim_{x \to 0} \frac{\sin x}{x}", "2"),
    (r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix} + x", r"\begin{vmatrix}1 & 2\\3 & 5\end{vmatrix}"),
)


def _warm() -> None:
    math_score("1/2", r"\frac{2}{3} + \sqrt{2}")
    for left, right in WARM:
        math_score(left, right)


KIND = Kind(
    judge,
    "the final answer equals the reference: number, unit, expression, set, interval or text",
    Example({"answer": "1/2"}, r"<answer>\frac{2}{4}</answer>", "<answer>2</answer>"),
    may_hang=True,
    at_once=at_once,
    warm=_warm,
)
