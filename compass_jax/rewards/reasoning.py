"""The scorers of reasoning-gym's data sets.

Imported by reward workers: nothing here may import jax. A score is the checker's number, 1 for
right and 0 for wrong; an exception is a failure of the check, which the caller reports as unknown
and never as 0.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

from compass_jax.config import ConfigError
from compass_jax.verifiers.answers import is_arithmetic, is_expression, literal
from compass_jax.verifiers.extract import number

FORMAT_CREDIT = 0.05  # reasoning-gym's scorers give 0.01 or 0.05 for any answer that can be parsed

# data sets whose scorers evaluate the answer: how it is read instead, or which answers they get
READERS: dict[str, Callable[[str], Any]] = {
    "countdown": is_arithmetic,
    "puzzle24": is_arithmetic,
    "polynomial_multiplication": is_expression,
    "simple_integration": is_expression,
    "intermediate_integration": is_expression,
    "binary_matrix": literal,
    "spiral_matrix": literal,
    "string_insertion": literal,
    "n_queens": literal,
}


@lru_cache(maxsize=256)
def dataset_of(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    """Returns the reasoning-gym data set with these options, made once."""
    import reasoning_gym

    def as_list(value: Any) -> Any:
        return [as_list(item) for item in value] if isinstance(value, tuple) else value

    return reasoning_gym.create_dataset(name, **{key: as_list(value) for key, value in options})


def _class(dataset: str) -> type:
    from reasoning_gym.factory import DATASETS

    return DATASETS[dataset][0]


def take_over(dataset: str) -> None:
    """Makes `literal` the `eval` of a data set whose scorer would evaluate lists."""
    if READERS.get(dataset) is literal:
        vars(sys.modules[_class(dataset).__module__])["eval"] = literal


def module_of(dataset: str) -> str:
    """Returns the module ("a.b", or the path of its file) that registered a data set in this
    process, for workers to import; empty for one of reasoning-gym, and for an unknown one.

    Raises ConfigError for one that is defined in the program that was started: a worker cannot
    import that without running it.
    """
    factory = sys.modules.get("reasoning_gym.factory")
    if factory is None or dataset not in factory.DATASETS:
        return ""
    cls = factory.DATASETS[dataset][0]
    if cls.__module__.split(".")[0] == "reasoning_gym":
        return ""
    codes = [x.__code__ for x in vars(cls).values() if isinstance(x, FunctionType)]
    file = next((code.co_filename for code in codes if os.path.isfile(code.co_filename)), "")
    if cls.__module__ == "__main__" or not (file or "." in cls.__module__):
        raise ConfigError(
            f"the reasoning-gym data set {dataset!r} is registered by {cls.__module__}, which"
            " reward workers cannot import; move it into a file of its own, and import that"
        )
    return cls.__module__ if "." in cls.__module__ else os.path.abspath(file)


def evaluates(dataset: str) -> bool:
    """Returns whether the scorer of a data set gives text to Python or sympy, so that it is judged
    in a child. All of its module counts, except for the data sets of READERS.
    """
    if dataset in READERS:
        return READERS[dataset] is is_expression
    source = inspect.getsource(sys.modules[_class(dataset).__module__])
    return re.search(r"\b(eval|exec|compile|parse_expr|sympify)\(", source) is not None


def can_be_read(dataset: str, answer: str) -> bool:
    """Returns whether a scorer may see an answer. Where the evaluated answer is a list, the scorer
    compares texts first, and `literal` refuses.
    """
    reader = READERS.get(dataset, literal)
    return reader is literal or bool(reader(answer))


def reasoning_gym_score(
    dataset_name: str,
    entry: dict[str, Any],
    answer: str,
    options: tuple[tuple[str, Any], ...] = (),
) -> float:
    """Returns the score of the dataset's scorer (some depend on the dataset's `options`), unchanged
    but for two cases.

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
