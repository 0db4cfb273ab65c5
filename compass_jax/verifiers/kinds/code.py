"""Programs, judged by running them on tests (verifiers/program.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from compass_jax.verifiers.base import NOTHING, UNKNOWN_STEPS, Example, Kind
from compass_jax.verifiers.extract import extract_answer
from compass_jax.verifiers.program import Limits, passed_functions, passed_outputs

_FENCED = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_PYTHON = re.compile(
    r"^\s*(?:def|class|import|from|return|for|print|[A-Za-z_]\w*\s*=)", re.MULTILINE
)


def judge(
    response: str,
    answer_tag: str,
    tests: Sequence[str] = (),
    test: str = "",
    entry_point: str = "",
    setup: str = "",
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    credit: str = "share",
    seconds: float = 3.0,
    memory_mb: int = 512,
) -> Mapping[str, Any]:
    """The share of tests that the program passes, or with credit "all" 1 where it passes each.

    The program is the response's last block between ``` marks, else the answer's tag, else all of
    it; `setup` is put before it. Its tests are Python texts (`tests`, as MBPP has them), or one
    that defines `check(candidate)` (`test` and `entry_point`, as HumanEval has them), or pairs of
    input and output. It has `seconds` for all of them together.

    Raises ValueError for a row without tests.
    """
    program = _program(response, answer_tag)
    if program is None:
        return NOTHING
    limits = Limits(seconds, memory_mb)
    if entry_point:
        tests = [*tests, f"{test}\ncheck({entry_point})"]
    if len(inputs) != len(outputs) or bool(tests) == bool(inputs):
        raise ValueError(
            f"the row has {len(tests)} tests, {len(inputs)} inputs and {len(outputs)} outputs: it"
            " needs tests, or as many inputs as outputs"
        )
    text = f"{setup}\n{program}"
    if tests:
        found = passed_functions(text, tests, setup, limits)
    else:
        found = passed_outputs(text, inputs, outputs, limits)
    count = len(tests) or len(inputs)
    if credit == "all":
        return {"reward": float(_count_until_false(found) == count)}
    return {"reward": sum(islice(found, count)) / count}


def _program(response: str, tag: str) -> str | None:
    blocks = _FENCED.findall(response)
    if blocks:
        return blocks[-1]
    text = (extract_answer(response, tag) if tag else None) or response
    return text if _PYTHON.search(text) else None


def _count_until_false(found: Any) -> int:
    count = 0
    for passed in found:
        if not passed:
            break
        count += 1
    found.close()
    return count


def _complaint(given: Mapping[str, Any]) -> str:
    if (credit := given.get("credit", "share")) not in ("share", "all"):
        return f"credit = {credit!r:.40} must be share or all"
    for name, most in (("seconds", 3600), ("memory_mb", 2**20)):
        value = given.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            return f"{name} = {value!r:.40} must be a number above 0, and at most {most}"
    return ""


KIND = Kind(
    judge,
    "the program in the response passes all of the row's tests; else the share that it passes",
    Example(
        {"tests": ["assert double(2) == 4", "assert double([1]) == [1, 1]"]},
        "```python\ndef double(x):\n    return x * 2\n```",
        "```python\ndef double(x):\n    return x + 2\n```",
    ),
    answer=False,
    takes=(
        *("tests", "test", "entry_point", "setup", "inputs", "outputs"),
        *("credit", "seconds", "memory_mb"),
    ),
    looks_for="a program: the last block between ``` marks, else {last}, else all of it",
    steps=lambda given: 1 if given.get("credit") == "all" else UNKNOWN_STEPS,
    may_hang=True,
    runs_programs=True,
    complaint=_complaint,
)
