"""A share of the slow tests, so that a run of CI has time for it: every N runs all of them ran."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent


def part_of(items: Sequence[str], asked: str) -> set[str]:
    """The K-th of N parts of `items`; the parts together are all of them, each once.

    Tests of one file are neighbours after sorting, and go to different parts: the dear ones of a
    file do not meet in one.

    Args:
        items: node ids.
        asked: "K/N", 1 <= K <= N.

    Raises ValueError for any other text.
    """
    numbers = asked.split("/")
    if len(numbers) != 2 or not all(x.isascii() and x.isdigit() for x in numbers):
        raise ValueError(f"--slow-part is {asked!r}; write K/N, such as 2/5")
    k, n = map(int, numbers)
    if not 1 <= k <= n:
        raise ValueError(f"--slow-part is {asked!r}; K goes from 1 to N")
    return set(sorted(items)[k - 1 :: n])


def slow_functions() -> Iterator[tuple[str, str]]:
    """File and name of each test that is marked slow, or has a case that is, also by a list of
    cases that has a name in its file.
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
