"""Scorers of reasoning-gym's data sets, as the library has them.

Some evaluate the answer, with `eval` or sympy's parser. They run in the worker's sandbox, in a
child process per answer with limits of time and memory and without a network. There an answer's
code could still give itself a score, so that only answers which evaluate to a value reach these
scorers.

A score is 1 for a right answer and 0 for a wrong one. An exception is a failure of the check, which
the caller reports as unknown, never as 0. Reward workers import this module, so it must not import
jax.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.config import ConfigError
from compass_jax.rewards.verifiers.answers import is_arithmetic, is_expression, is_inert
from compass_jax.rewards.verifiers.extract import number

FORMAT_CREDIT = 0.05  # reasoning-gym's scorers give 0.01 or 0.05 for any answer that can be parsed

# Data sets whose scorers evaluate the answer, with the filter of answers that are values.
READERS: dict[str, Callable[[str], bool]] = {
    "countdown": is_arithmetic,
    "puzzle24": is_arithmetic,
    "polynomial_multiplication": is_expression,
    "simple_integration": is_expression,
    "intermediate_integration": is_expression,
    "binary_matrix": is_inert,
    "spiral_matrix": is_inert,
    "string_insertion": is_inert,
    "n_queens": is_inert,
}


@lru_cache(maxsize=256)
def dataset_of(name: str, options: tuple[tuple[str, Json], ...]) -> Json:
    """Returns the reasoning-gym data set with these options (cached)."""
    import reasoning_gym

    def as_list(value: Json) -> Json:
        return [as_list(item) for item in value] if isinstance(value, tuple) else value

    return reasoning_gym.create_dataset(name, **{key: as_list(value) for key, value in options})


def _class(dataset: str) -> type:
    from reasoning_gym.factory import DATASETS

    return DATASETS[dataset][0]


def module_of(dataset: str) -> str:
    """Returns the module ("a.b", or the path of its file) that registered a data set in this
    process, so that workers can import it; empty for reasoning-gym's own and for unknown data sets.

    Raises ConfigError for a data set defined in the main program, which a worker cannot import
    without running it.
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
    """Returns whether the scorer of a data set passes text to Python or sympy and must therefore
    run in a child process. The whole module of the scorer is searched.
    """
    source = inspect.getsource(sys.modules[_class(dataset).__module__])
    return re.search(r"\b(eval|exec|compile|parse_expr|sympify)\(", source) is not None


def can_be_scored(dataset: str, answer: str, entry: JsonObject) -> bool:
    """Returns whether an answer may be passed to the scorer: the reference, which every scorer
    compares as text, and what its filter accepts.
    """
    return dataset not in READERS or answer == entry.get("answer") or READERS[dataset](answer)


def reasoning_gym_score(
    dataset_name: str,
    entry: JsonObject,
    answer: str,
    options: tuple[tuple[str, Json], ...] = (),
) -> float:
    """Returns the score of the data set's scorer (some depend on its `options`), with two changes.

    A score of up to FORMAT_CREDIT, which any parsable answer gets, becomes 0, so that a group of
    wrong answers has equal rewards. If the scorer raises on this answer but not on the reference,
    the answer is unreadable and the score is 0. If it raises on both, the exception is raised.
    """
    dataset = dataset_of(dataset_name, options)
    try:
        score = number(dataset.score_answer(answer, entry))
    except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
        dataset.score_answer(entry["answer"], entry)
        return 0.0
    return 0.0 if 0.0 < score <= FORMAT_CREDIT else score
