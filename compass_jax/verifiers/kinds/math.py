"""Mathematics, compared by math-verify."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from compass_jax.verifiers.answers import exact, is_program
from compass_jax.verifiers.base import NOTHING, Example, Kind
from compass_jax.verifiers.extract import final_answer, reference

# What a child would have to learn again for each answer: math-verify's parser remembers decisions,
# sympy imports when asked
WARM = (
    ("$1/2$", "$0.5$"),
    (r"\frac{1}{3} + \sqrt{2}", r"\frac{2}{6} + \sqrt{2}"),
    ("(x+1)^2", "x^2+2x+1"),
    ("x=2", "2"),
    (r"\{1, 2\}", r"\{2, 1\}"),
    ("[0, 1)", "(0, 1]"),
    (r"(-\infty, 3]", r"(-\infty, 2]"),
    ("50\\%", "0.5"),
    (r"2\pi r^2", r"\pi r^2"),
    (r"\sin(x)^2 + \cos(x)^2", "1"),
    (r"\log_2(8)", "3.0"),
    (r"e^{2x} - \ln(y)", "e^x"),
    ("3 + 4i", "4i + 3"),
    ("x > 3", "3 < x"),
    (r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}", r"\begin{pmatrix}1 & 2\\3 & 5\end{pmatrix}"),
    ("(1, 2)", "(1, 3)"),
    ("7 \\text{ cm}", "7 m"),
    (r"\frac{\sqrt{3}}{2}", r"\frac{3}{2\sqrt{3}}"),
    ("10^{-3}", "0.001"),
    (r"\binom{5}{2}", "10"),
    ("5!", "120"),
    ("2x + 3y = 6", "y = 2"),
)


def judge(response: str, answer: Any, answer_tag: str) -> float | Mapping[str, Any]:
    """1 where the final answer equals the reference by math-verify. Of a reference with #### in it,
    what follows counts.
    """
    found = final_answer(response, answer_tag)
    return NOTHING if found is None else math_verify_score(found, reference(answer))


def at_once(response: str, answer: Any, answer_tag: str) -> float | Mapping[str, Any] | None:
    """What `math` gives, where no algebra is needed to say it; else None."""
    found = final_answer(response, answer_tag)
    return NOTHING if found is None else math_decided(found, reference(answer))


def math_decided(answer: str, reference: str) -> float | None:
    """1.0 or 0.0 where no algebra is needed to say whether `answer` is `reference`, else None.

    Equal texts are equal, two plain decimals are compared exactly, and so are two plain fractions.
    A reference that is a word ("Paris") is compared as text: as mathematics it would be a product
    of letters, equal to each of its anagrams. Program text is no answer.
    """
    if _plain(answer) == _plain(reference):
        return 1.0
    word = re.search(r"[^\W\d_]{3,}", reference)
    if word and not re.search(r"[\d\\$=+*/^(){}\[\]]", reference):
        return 0.0
    if is_program(answer):
        return 0.0
    found = exact(answer)
    wanted = exact(reference)
    if found and wanted and found[0] == wanted[0]:
        return float(found[1] == wanted[1])
    return None


def math_verify_score(answer: str, reference: str) -> float:
    """1.0 if `math_decided` or math-verify finds `answer` equal to `reference`, else 0.0.

    There is no time limit in here: math-verify's own limits turn an undecided comparison into
    "wrong". The process is killed from outside instead.
    """
    decided = math_decided(answer, reference)
    if decided is not None:
        return decided
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off
    gold = math_verify.parse(_delimited(reference), parsing_timeout=None)
    found = math_verify.parse(_delimited(answer), parsing_timeout=None)
    if not gold or not found:
        return 0.0
    return float(math_verify.verify(gold, found, timeout_seconds=None, raise_on_error=True))


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _delimited(text: str) -> str:
    """math-verify reads an expression as LaTeX only between delimiters."""
    return text if any(mark in text for mark in ("$", "\\boxed", "\\(", "\\[")) else f"${text}$"


def _warm() -> None:
    for left, right in WARM:
        math_verify_score(left, right)


KIND = Kind(
    judge,
    "the final answer equals the reference by math-verify",
    Example({"answer": "1/2"}, r"<answer>\frac{2}{4}</answer>", "<answer>2</answer>"),
    may_hang=True,
    at_once=at_once,
    warm=_warm,
)
