"""Parts of the slow tests, each short enough for a run of CI: N runs together run them all."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent


def part_of(items: Sequence[str], part: str) -> set[str]:
    """Returns the K-th of N parts of `items`. The parts are disjoint and together hold all items.

    Tests of one file are neighbours after sorting and go to different parts, so that the expensive
    tests of a file do not end up in one part.

    Args:
        items: node ids.
        part: "K/N", 1 <= K <= N.

    Raises ValueError for any other text.
    """
    numbers = part.split("/")
    if len(numbers) != 2 or not all(x.isascii() and x.isdigit() for x in numbers):
        raise ValueError(f"--slow-part is {part!r}; write K/N, such as 2/5")
    k, n = map(int, numbers)
    if not 1 <= k <= n:
        raise ValueError(f"--slow-part is {part!r}; K goes from 1 to N")
    return set(sorted(items)[k - 1 :: n])


def slow_functions() -> Iterator[tuple[str, str]]:
    """Yields the file and name of each test that is marked slow, itself or in one of its cases,
    even if the cases are in a named list of its file.
    """
    for path in sorted(HERE.rglob("test_*.py")):
        lists: set[str] = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and _names_slow(node.value, lists):
                lists |= {x.id for x in node.targets if isinstance(x, ast.Name)}
            test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            if test and any(_names_slow(x, lists) for x in node.decorator_list):
                yield str(path.relative_to(HERE)), node.name


def _names_slow(node: ast.AST, lists: set[str]) -> bool:
    return any(
        (isinstance(x, ast.Attribute) and x.attr == "slow")
        or (isinstance(x, ast.Name) and x.id in lists)
        for x in ast.walk(node)
    )
