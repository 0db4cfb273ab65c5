"""The compiled programs of a run as values: the engine, the learner and the weight sync list what
they run, each with its abstract arguments. `compass plan` compiles what these lists say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax


@dataclass(frozen=True, eq=False)
class Program:
    """One jitted function and the arguments of one shape in which it runs.

    Args:
        name: several programs that differ in size alone have one; the largest comes last.
        function: it is jitted.
        arguments: structs, static values, and `Result`s of programs that come before.
        keywords: arguments by name, in the same way.
        tokens: that one run of it takes in, all devices together.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0

    def lower(self, results: Mapping[Program, Any]) -> jax.stages.Lowered:
        """What the compiler takes; `results` are structs of what earlier programs give."""
        arguments, keywords = _filled((self.arguments, dict(self.keywords)), results)
        return self.function.lower(*arguments, **keywords)


class Result(NamedTuple):
    """What a program gives, or what `pick` takes out of it: an argument of another one."""

    program: Program
    pick: Callable[[Any], Any] = lambda found: found


def _is_result(x: Any) -> bool:
    return isinstance(x, Result)


def _filled(tree: Any, results: Mapping[Program, Any]) -> Any:
    """`tree` with structs in the place of each `Result`."""

    def fill(x: Any) -> Any:
        return x.pick(results[x.program]) if isinstance(x, Result) else x

    return jax.tree.map(fill, tree, is_leaf=_is_result)


def struct(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """An array that is not there."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
