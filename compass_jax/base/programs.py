"""The compiled programs of a run as values: the engine, the learner and the weight sync list the
programs that they run, with abstract arguments. `compass plan` compiles these lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from compass_jax.base.aliases import Tree


@dataclass(frozen=True, eq=False)
class Program:
    """One jitted function and its arguments of one shape.

    Args:
        name: programs that differ in size only share a name; the largest comes last.
        function: a jitted function.
        arguments: structs, static values, and `Result`s of earlier programs.
        keywords: arguments by name, of the same kinds.
        tokens: tokens that one run processes over all devices.
    """

    name: str
    function: Any
    arguments: tuple[Tree, ...]
    keywords: Mapping[str, Tree] = field(default_factory=dict)
    tokens: int = 0

    def lower(self, results: Mapping[Program, Tree]) -> jax.stages.Lowered:
        """Lowers the program; `results` are structs of earlier programs' results."""
        arguments, keywords = _filled((self.arguments, dict(self.keywords)), results)
        return self.function.lower(*arguments, **keywords)


class Result(NamedTuple):
    """The result of a program, or the part that `pick` returns, as another's argument."""

    program: Program
    pick: Callable[[Tree], Tree] = lambda result: result


def _is_result(x: Tree) -> bool:
    return isinstance(x, Result)


def _filled(tree: Tree, results: Mapping[Program, Tree]) -> Tree:
    """Replaces each `Result` in `tree` by its structs."""

    def fill(x: Tree) -> Tree:
        return x.pick(results[x.program]) if isinstance(x, Result) else x

    return jax.tree.map(fill, tree, is_leaf=_is_result)


def struct(shape: tuple[int, ...], dtype: Any, sharding: Tree = None) -> jax.ShapeDtypeStruct:
    """Returns an abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
