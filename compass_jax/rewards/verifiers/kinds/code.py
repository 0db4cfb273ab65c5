"""Programs, verified by running unit tests (rewards/verifiers/program.py)."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from compass_jax.base.aliases import Json, JsonMapping
from compass_jax.base.chat.base import AUTO
from compass_jax.config.kinds import (
    NOTHING,
    UNKNOWN_STEPS,
    Example,
    Form,
    Kind,
    complaints,
    number_in,
    one_of,
)
from compass_jax.devices.processes import guards
from compass_jax.rewards.verifiers import program
from compass_jax.rewards.verifiers.extract import visible
from compass_jax.rewards.verifiers.program_blocks import find_program
from compass_jax.rewards.verifiers.program_objects import RowError
from compass_jax.rewards.verifiers.program_run import complaint
from compass_jax.rewards.verifiers.program_suites import split_suite
from compass_jax.rewards.verifiers.program_tests import RowTests, joined_program, read_tests

_PATIENCE = 4  # times the limit of a response: machines are busy before a run
_OfRow = RowTests | tuple[list[str], list[str]]  # tests, or inputs and outputs


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
    in_place: bool | None = None,
    chat_format: str = AUTO,
) -> JsonMapping:
    """Returns the share of tests that the program passes. With credit "all", returns 1 if it passes
    all tests, else 0.

    The program is a block of the response (`find_program`), without thoughts; `setup` is prepended.
    The tests are Python texts (`tests`, as in MBPP), or one text: `check(candidate)` (`test` and
    `entry_point`, as in HumanEval) or a suite of unittest or pytest; or pairs of input and output.
    All tests together have `seconds`. Calls return the program's changes to its arguments with
    `in_place`; None: only if the test looks at them (program_in_place.py).

    Raises RowError for a row without tests, or with tests that cannot run.
    """
    of_row = _read_row(tests, test, entry_point, setup, inputs, outputs, in_place)
    needed = of_row.needed if isinstance(of_row, RowTests) else frozenset()
    text = find_program(visible(response, chat_format), answer_tag, needed)
    if text is None:
        return NOTHING
    limits = program.Limits(min(seconds, guards.seconds_left()), memory_mb)

    work = _work(text, of_row, setup, bool(in_place))
    count = _count(of_row)
    results = program.passed(work, limits, stop_at_failure=credit == "all")
    if credit == "all":
        return {"reward": float(results == [True] * count)}
    return {"reward": sum(results) / count}


def _work(
    text: str, of_row: _OfRow, setup: str, in_place: bool
) -> Callable[[program.Limits], Iterator[bool]]:
    """Returns the work that tries a program on a row's tests, or its inputs and outputs."""

    def work(limits: program.Limits) -> Iterator[bool]:
        if isinstance(of_row, RowTests):
            return program.passed_functions(text, of_row, limits, in_place)
        return program.passed_outputs(joined_program(setup or "", text), *of_row, limits)

    return work


def _count(of_row: _OfRow) -> int:
    return len(of_row.tests if isinstance(of_row, RowTests) else of_row[0])


def _read_row(
    tests: Json,
    test: str | None,
    entry_point: str | None,
    setup: str | None,
    inputs: Json,
    outputs: Json,
    in_place: bool | None,
) -> _OfRow:
    """Returns a row's compiled tests, or its inputs and outputs. Raises RowError."""
    for name, value in (("tests", tests), ("inputs", inputs), ("outputs", outputs)):
        if isinstance(value, str) or not all(isinstance(x, str) for x in value or ()):
            raise RowError(f"{name} = {value!r:.80} must be a list of texts")
    texts = [part for text in tests or () for part in split_suite(text)]
    if test:
        suite = split_suite(test)
        is_check = entry_point and suite == [test]
        texts += [f"{test}\ncheck({entry_point})"] if is_check else suite
    stdin, expected = list(inputs or ()), list(outputs or ())
    if len(stdin) != len(expected) or bool(texts) == bool(stdin):
        raise RowError(
            f"the row has {len(texts)} tests, {len(stdin)} inputs and {len(expected)} outputs: it"
            " needs tests, or as many inputs as outputs"
        )
    if stdin:
        return stdin, expected
    return read_tests(texts, setup or "", entry_point or "", in_place)


def row_faults(rows: Sequence[JsonMapping]) -> list[str]:
    """Returns the fault of each row whose setup or tests cannot run, or whose own program, in the
    column `solution`, fails a test; empty for a valid row.
    """
    setup_fault = cache(program.setup_fault)
    faults = []
    for row in rows:
        names = ("tests", "test", "entry_point", "setup", "inputs", "outputs", "in_place")
        try:
            of_row = _read_row(*(row.get(name) for name in names))
        except RowError as error:
            faults.append(str(error))
            continue
        fault = complaint(of_row) if isinstance(of_row, RowTests) else ""
        # a program's process may import fewer packages than that of the tests
        fault = fault or (setup_fault(of_row.setup) if isinstance(of_row, RowTests) else "")
        faults.append(fault or _solution_fault(row, of_row))
    return faults


def _solution_fault(row: JsonMapping, of_row: _OfRow) -> str:
    """Returns the error of a row whose own program fails a test; else an empty text."""
    text = row.get("solution")
    if not isinstance(text, str) or not text.strip():
        return ""
    limits = program.Limits(_PATIENCE * (row.get("seconds") or 3.0), row.get("memory_mb") or 512)
    needed = of_row.needed if isinstance(of_row, RowTests) else frozenset()
    text = find_program(text, "", needed) or text
    work = _work(text, of_row, row.get("setup") or "", bool(row.get("in_place")))
    try:
        results = program.passed(work, limits, stop_at_failure=True)
    except RowError as error:
        return str(error)
    count = _count(of_row)
    if results == [True] * count:
        return ""
    if guards.seconds_left() < 1:
        raise TimeoutError("the row's own program had too little time")
    return (
        f"its own program (column 'solution') fails test {len(results) or 1} of {count}, here in"
        " another process than its tests; mend the test, or remove the column to use the row"
    )


def _warm() -> None:
    """Imports what tests usually import, once for all responses."""
    for name in ("unittest", "numpy", "pytest"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


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
        *("credit", "seconds", "memory_mb", "in_place"),
    ),
    form=Form(
        r"```|\bcode\b|\bprogram\b|\bfunction\b|\bdef ",
        "Write the program in one block between ```python and ```.",
    ),
    looks_for="a program: the last Python block between ``` marks, else {last}, else all of it",
    steps=lambda arguments: 1 if arguments.get("credit") == "all" else UNKNOWN_STEPS,
    may_hang=True,
    runs_programs=True,
    warm=_warm,
    complaint=complaints(
        credit=one_of("share", "all"),
        seconds=number_in(3600, " above 0, and at most 3600", above=True),
        memory_mb=number_in(2**20, f" above 0, and at most {2**20}", above=True),
    ),
    row_faults=row_faults,
)
