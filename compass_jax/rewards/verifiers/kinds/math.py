"""Mathematical answers, compared by value; and numbers, equal within a tolerance."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from fractions import Fraction

from compass_jax.base.aliases import Json, JsonMapping
from compass_jax.base.chat.base import AUTO
from compass_jax.config.kinds import (
    FINAL_FORM,
    NOTHING,
    Example,
    Kind,
    complaints,
    number_in,
)
from compass_jax.rewards.verifiers.answers import canonical, is_program
from compass_jax.rewards.verifiers.extract import (
    boxed,
    final_answer,
    last_formula,
    stated,
)
from compass_jax.rewards.verifiers.maths.equality import same_answer
from compass_jax.rewards.verifiers.maths.evaluation import as_fraction, constant, is_real
from compass_jax.rewards.verifiers.maths.notation import normalised
from compass_jax.rewards.verifiers.maths.quantities import Quantity, is_wordy
from compass_jax.rewards.verifiers.maths.values import Named, readings
from compass_jax.rewards.verifiers.references import texts

MAX_CHARS = 600  # maximum length of a formula passed to Math-Verify
SECONDS = 2  # timeout of each step of Math-Verify; a timeout is a wrong answer
NUMBER_CHARS = 200
MAX_BITS = 1_400  # maximum size of a numerator or denominator: about 400 digits
_TOLERANCE = number_in(1e300, ", 0 or more")
# a number in prose; digits after a letter belong to a unit or a name
_NUMBER = re.compile(
    r"(?<![\w.^{\\])[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)"
    r"(?:\s*(?:\\times|\\cdot|[x*])\s*10\s*\^\s*(?:\{\s*-?\d{1,3}\s*\}|-?\d{1,3}))?"
)
_PERCENT = re.compile(r"\d\s*(?:\\text\{\s*)?\$?\s*\\?(?:%|percent\b|per\s+cent\b)", re.IGNORECASE)
_PROSE = re.compile(r"[\s*\"']*[A-Za-z]{2,}(?:[\s:,']+[A-Za-z]+|\s*(?::|\$|\\[(\[]))")
_LONG_NUMBER = re.compile(r"\d{20}")
_LARGE_POWER = re.compile(
    r"\^\s*(?:\{?\s*-?\d{5}|\{[^{}]*\^|-?\w+\s*\^)|[)}]\s*\^\s*\{?\d{3}|!\s*[!)}^]*!|\d{5}\s*!"
)
_LARGE_BOUND = re.compile(r"\\(?:sum|prod)[^\\]*?\^\s*(?:\{?\s*\d{5}|\{[^{}]*[\^!])")


def judge(
    response: str, answer: Json, answer_tag: str, chat_format: str = AUTO
) -> float | JsonMapping:
    r"""Returns 1 if the final answer is the reference.

    If the reference contains #### or \boxed{...}, the text after the mark or in the box is used.
    """
    text = _final_answer(response, answer_tag, chat_format)
    if text is None:
        return NOTHING
    return max(math_score(text, reference) for reference in _references(answer))


def at_once(
    response: str, answer: Json, answer_tag: str, chat_format: str = AUTO
) -> float | JsonMapping | None:
    """Returns the result of `judge`, or None if it needs Math-Verify."""
    text = _final_answer(response, answer_tag, chat_format)
    if text is None:
        return NOTHING
    scores = [math_decided(text, reference) for reference in _references(answer)]
    return 1.0 if 1.0 in scores else None if None in scores else 0.0


def _final_answer(response: str, tag: str, chat_format: str) -> str | None:
    """Returns the final answer. With an empty tag, the last formula of a sentence is its answer."""
    text = final_answer(response, tag, chat_format)
    if tag or text is None:
        return text
    text = final_answer(text, "answer") or text
    prose = _PROSE.match(text) and not is_program(text)
    return (last_formula(text) or text) if prose else text


def _references(answer: Json) -> list[str]:
    return [boxed(text + "}") or boxed(text) or stated(text) or text for text in texts(answer)]


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
        # Math-Verify expects delimiters
        math_verify.parse(
            text if re.search(r"\$|\\boxed|\\\(|\\\[", text) else f"${text}$",
            formulas,
            parsing_timeout=SECONDS,
        )
        for text in (reference, answer)
    )
    if not gold or not value:
        return 0.0
    return float(math_verify.verify(gold, value, timeout_seconds=SECONDS))


# pairs that fill the cache of Math-Verify's parser before children are forked
WARM = (
    ("1/2", r"\frac{2}{3} + \sqrt{2}"),
    (r"\sum_{k=1}^{n} k", r"\sum_{j=1}^{n} j"),
    (r"\int_0^1 x dx", r"\int_0^1 y^2 dy"),
    (r"\lim_{x \to 0} \frac{\sin x}{x}", "2"),
    (r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix} + x", r"\begin{vmatrix}1 & 2\\3 & 5\end{vmatrix}"),
)


def _warm() -> None:
    for left, right in WARM:
        math_score(left, right)


def _answer_formula(arguments: JsonMapping) -> str:
    return _references(arguments.get("answer"))[0]


def numeric(
    response: str,
    answer: Json,
    answer_tag: str,
    abs_tol: float = 0.0,
    rel_tol: float = 1e-6,
    chat_format: str = AUTO,
) -> float | JsonMapping:
    """Returns 1 if |answer - reference| <= max(abs_tol, rel_tol |reference|), computed exactly.
    Words and units around the number are ignored. An answer with two numbers is no answer. A
    percentage equals its number or a hundredth of it: only the hundredth if the other number is
    between -1 and 1.
    """
    text = final_answer(response, answer_tag, chat_format)
    value = None if text is None else value_of(text)
    if value is None:
        return NOTHING
    for gold in _numbers(answer):
        for number, target in _comparable((value, _is_percent(text)), gold):
            if abs(number - target) <= max(Fraction(abs_tol), Fraction(rel_tol) * abs(target)):
                return 1.0
    return 0.0


def _numbers(answer: Json) -> list[tuple[Fraction, bool]]:
    """Returns the numbers of a reference, and whether each is a percentage. Raises ValueError."""
    numbers = []
    for text in texts(answer):
        number = value_of(text)
        if number is None:
            raise ValueError(f"the reference {text!r:.100} is no number: write one")
        numbers.append((number, _is_percent(text)))
    return numbers


def _answer_number(arguments: JsonMapping) -> str:
    _numbers(arguments.get("answer"))
    return first_text(arguments)


def _comparable(
    answer: tuple[Fraction, bool], gold: tuple[Fraction, bool]
) -> Iterator[tuple[Fraction, Fraction]]:
    """Yields the pairs of numbers that two numbers may stand for. Each comes with whether it is a
    percentage.
    """
    (value, percent), (right, gold_percent) = answer, gold
    bare = right if percent else value
    if percent == gold_percent or abs(bare) >= 1 or not bare:
        yield value, right
    if percent != gold_percent:
        yield (value / 100, right) if percent else (value, right / 100)


def _is_percent(text: str | None) -> bool:
    return _PERCENT.search(text or "") is not None


def value_of(text: str) -> Fraction | None:
    """Returns the only number in a text ("about 3.5 km", "1.2e3", "3/4"), or None for no number or
    several. The number of a percentage is that before its sign.
    """
    if len(text) > NUMBER_CHARS:
        return None
    text = normalised(text)
    values = [_number_in(value) for value in readings(text)]
    if values[0] is not None or not is_wordy(text):
        return values[0]
    numbers = [mark[0].strip() for mark in _NUMBER.finditer(text)]
    return _number_in(readings(numbers[0])[0]) if len(numbers) == 1 else None


def _number_in(value: Json) -> Fraction | None:
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


def _vote_of_number(response: str, answer_tag: str, chat_format: str = AUTO) -> str | None:
    answer = final_answer(response, answer_tag, chat_format)
    value = None if answer is None else value_of(answer)
    return None if value is None else str(value)


def first_text(arguments: JsonMapping) -> str:
    """Returns the first right answer of a reference. Raises ValueError for an unreadable one."""
    return texts(arguments.get("answer"))[0]


def final_vote(response: str, answer_tag: str, chat_format: str = AUTO) -> str | None:
    """Returns the final answer in its canonical form."""
    return canonical(final_answer(response, answer_tag, chat_format))


KINDS = {
    "math": Kind(
        judge,
        "the final answer equals the reference: number, unit, expression, set, interval or text",
        Example({"answer": "1/2"}, r"<answer>\frac{2}{4}</answer>", "<answer>2</answer>"),
        form=FINAL_FORM,
        vote=final_vote,
        may_hang=True,
        at_once=at_once,
        warm=_warm,
        answer_text=_answer_formula,
    ),
    "numeric": Kind(
        numeric,
        "the final answer is a number within `abs_tol` or `rel_tol` of the reference",
        Example({"answer": "9.81", "abs_tol": 0.05}, r"\boxed{9.8} m/s", r"\boxed{9.7} m/s"),
        takes=("abs_tol", "rel_tol"),
        form=FINAL_FORM,
        vote=_vote_of_number,
        answer_text=_answer_number,
        complaint=complaints(abs_tol=_TOLERANCE, rel_tol=_TOLERANCE),
    ),
}
