"""The checks that are built in: math-verify, and reasoning-gym's own scorers.

Imported by reward workers: nothing here may import jax. A score is the checker's own number, 1 for
right and 0 for wrong; anything that raises is a failure of the check, which the caller reports as
unknown and never as 0.
"""

from __future__ import annotations

import inspect
import logging
import math
import numbers
import re
import sys
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from compass_jax.rewards.answers import (
    arithmetic,
    exact,
    expression,
    is_arithmetic,
    is_expression,
    is_program,
    literal,
)

FORMAT_CREDIT = 0.05  # reasoning-gym's scorers give 0.01 or 0.05 for any answer that can be parsed


# data sets whose scorers evaluate the answer: the name that does it in their module, what replaces
# it
READERS: dict[str, tuple[str, Callable]] = {
    "countdown": ("parse_expr", arithmetic),
    "puzzle24": ("parse_expr", arithmetic),
    "polynomial_multiplication": ("sp", expression),
    "simple_integration": ("sympy", expression),
    "intermediate_integration": ("sympy", expression),
    "binary_matrix": ("eval", literal),
    "spiral_matrix": ("eval", literal),
    "string_insertion": ("eval", literal),
    "n_queens": ("eval", literal),
}


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


def extract_answer(response: str, tag: str) -> str | None:
    """The text between the last `<tag>` that is closed and its `</tag>`, stripped; None if there is
    none.

    An empty `tag` takes the whole response. Something that opens after the last closed answer and
    never closes is ignored.
    """
    if not tag:
        return response.strip()
    end = response.rfind(f"</{tag}>")
    start = response.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else response[start + len(tag) + 2 : end].strip()


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


@lru_cache(maxsize=256)
def dataset_of(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    """The reasoning-gym data set with these options, made once."""
    import reasoning_gym

    def as_list(value: Any) -> Any:
        return [as_list(item) for item in value] if isinstance(value, tuple) else value

    return reasoning_gym.create_dataset(name, **{key: as_list(value) for key, value in options})


def _class(dataset: str) -> type:
    from reasoning_gym.factory import DATASETS

    return DATASETS[dataset][0]


def evaluates(dataset: str) -> bool:
    """Whether the scorer of a reasoning-gym data set gives text to Python or sympy.

    Of a data set that nobody has looked at (READERS) all of the module counts, what draws its
    questions included. Those of READERS evaluate nothing, unless sympy builds the answer.
    """
    name, reader = READERS.get(dataset, ("", None))
    cls: Any = _class(dataset)
    source = inspect.getsource(cls.score_answer if reader else sys.modules[cls.__module__])
    found = re.findall(r"\b(eval|exec|compile|parse_expr|sympify)\(", source)
    return bool(set(found) - {name}) or reader is expression


def take_over(dataset: str) -> None:
    """Puts a reader that evaluates nothing in the place of what the data set's scorer calls.

    The names are those that its module looks up; a test shows that each is still looked up.
    """
    name, reader = READERS[dataset]
    module = sys.modules[_class(dataset).__module__]
    if name in ("sp", "sympy"):
        import sympy

        setattr(module, name, types.SimpleNamespace(**(vars(sympy) | {"parse_expr": reader})))
    else:
        setattr(module, name, reader)


def can_be_read(dataset: str, answer: str) -> bool:
    """Whether an answer has the form that a scorer which evaluates text may see.

    Where the evaluated answer is a list, the scorer compares texts first, and `literal` refuses.
    """
    reader = READERS.get(dataset, ("", literal))[1]
    if reader is literal:
        return True
    return is_arithmetic(answer) if reader is arithmetic else is_expression(answer)


def reasoning_gym_score(
    dataset_name: str,
    entry: dict[str, Any],
    answer: str,
    options: tuple[tuple[str, Any], ...] = (),
) -> float:
    """The score of the dataset's own scorer (some depend on the dataset's `options`), unchanged but
    for two cases.

    Up to FORMAT_CREDIT, which any parsable answer gets, counts as 0, so that a group of wrong
    answers is uniform. A scorer that raises on this answer but not on the reference could not read
    the answer: 0. One that raises on both raises here.
    """
    dataset = dataset_of(dataset_name, options)
    try:
        score = number(dataset.score_answer(answer, entry))
    except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
        dataset.score_answer(entry["answer"], entry)
        return 0.0
    return 0.0 if 0.0 < score <= FORMAT_CREDIT else score


def number(value: Any) -> float:
    """`value` as a float. Raises TypeError for what is no number ("1"), ValueError for NaN."""
    if not isinstance(value, numbers.Real) and type(value).__module__ != "numpy":
        raise TypeError(f"the check returned {value!r:.100}: it must be a number")
    if not math.isfinite(found := float(value)):
        raise ValueError(f"the check returned {found}")
    return found
