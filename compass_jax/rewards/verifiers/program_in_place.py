"""The calls of a test that change their arguments in the test, too.

A test may check its argument after the call (`xs` after `k = f(xs)`), or compute the expected value
from the argument (`assert f(xs) == sorted(xs)`). In the second case a program that clears `xs`
would choose the expected value. A test therefore sees the changes of an argument if it
ignores the call's result, or compares the argument with values that do not depend on the program,
and nowhere compares it with a result.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set

MARK = "__unused__"  # the name of `program_tests.in_place_variant` in tests

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def mark_calls(tree: ast.Module, program_names: Set[str]) -> ast.Module:
    """Marks the calls that change their arguments in the test. `program_names` are the names that
    the test takes from the program.
    """
    marked: list[ast.Call] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            marked += _Scope(node, program_names).calls()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            marked.append(node.value)
    for call in {id(call): call for call in marked}.values():
        call.func = ast.Call(ast.Name(MARK, ast.Load()), [call.func], [])
    return ast.fix_missing_locations(tree)


class _Scope:
    """The calls, assignments and comparisons of a function or module."""

    def __init__(self, node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef, names: Set[str]):
        self._nodes = list(_own_nodes(node))
        self._assigned = [pair for part in self._nodes for pair in _assignments(part)]
        arguments = [] if isinstance(node, ast.Module) else _parameters(node)
        self._program = {*names, *arguments}
        # a variable that holds an object of the program, or a result
        self._results = set[str]()
        for target, value in self._assigned:
            if self._calls_program(value) or _reads(value) & self._results:
                self._results.add(target)

    def calls(self) -> Iterator[ast.Call]:
        """Yields the calls with an argument whose changes the test sees."""
        for node in self._nodes:
            if isinstance(node, ast.Call) and self._is_program(node):
                values = [*node.args, *(keyword.value for keyword in node.keywords)]
                names = {value.id for value in values if isinstance(value, ast.Name)}
                if any(self._is_checked(name, node) for name in names):
                    yield node

    def _is_checked(self, name: str, call: ast.Call) -> bool:
        """Returns whether a test compares an argument after a call, and with independent values."""
        derived = {name} | {
            target
            for target, value in self._assigned
            if name in _reads(value) and value.lineno > call.lineno
        }
        checked = False
        for sides in self._comparisons():
            if sides[0].lineno < call.lineno:
                continue
            for side, expected in (sides, sides[::-1]):
                has_argument = bool(self._outside(side) & derived)
                has_result = self._calls_program(expected) or bool(
                    self._outside(expected) & self._results - derived
                )
                if has_argument and has_result:
                    return False
                independent = not self._outside(expected) & derived
                checked |= name in self._outside(side) and independent
        return checked

    def _comparisons(self) -> Iterator[tuple[ast.expr, ast.expr]]:
        for node in self._nodes:
            if isinstance(node, ast.Compare):
                yield from zip([node.left, *node.comparators], node.comparators)
            elif isinstance(node, ast.Call) and len(node.args) > 1:
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name.startswith("assert"):
                    yield node.args[0], node.args[1]

    def _outside(self, node: ast.expr) -> set[str]:
        """Returns the names that an expression reads outside of calls of the program."""
        if isinstance(node, ast.Call) and self._is_program(node):
            return set()
        parts = [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
        names = {node.id} if isinstance(node, ast.Name) else set()
        return names.union(*(self._outside(part) for part in parts))  # type: ignore[arg-type]

    def _calls_program(self, node: ast.AST) -> bool:
        return any(isinstance(part, ast.Call) and self._is_program(part) for part in ast.walk(node))

    def _is_program(self, call: ast.Call) -> bool:
        """Returns whether a call's function, or the object of its method, is the program's."""
        node: ast.AST = call.func
        while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id in self._program | self._results


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a scope in their order, without those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function):
            yield child
            yield from _own_nodes(child)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        if argument.arg not in ("self", "cls"):
            yield argument.arg


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yields the variables that a node assigns, each with the value."""
    pairs: list[tuple[ast.expr, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.For | ast.AsyncFor):
        pairs = [(node.target, node.iter)]
    for target, value in pairs:
        if value is not None:
            yield from ((name, value) for name in _reads(target))


def _reads(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
