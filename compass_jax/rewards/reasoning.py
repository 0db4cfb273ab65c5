"""The scorers of reasoning-gym's data sets.

Imported by reward workers: nothing here may import jax. A score is the checker's own number, 1 for
right and 0 for wrong; anything that raises is a failure of the check, which the caller reports as
unknown and never as 0.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from compass_jax.verifiers.answers import (
    arithmetic,
    expression,
    is_arithmetic,
    is_expression,
    literal,
)
from compass_jax.verifiers.extract import number

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
