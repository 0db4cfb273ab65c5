"""A static check of which fields of which classes the package reads, with a small inference of
types from annotations and assignments.

`config.sft.batch` is a read of SFTConfig.batch where `config` is annotated as a RunConfig, was
assigned from a value of that type, or is an attribute that a class declares so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = dict[str, set[str]]  # maps a name to its possible classes


def names_in(hint: ast.AST | None) -> set[str]:
    """Returns every name that an annotation mentions. Only the names of classes matter later."""
    if isinstance(hint, ast.Constant) and isinstance(hint.value, str):
        hint = ast.parse(hint.value, mode="eval")
    nodes = list(ast.walk(hint)) if hint else []
    return {getattr(n, "id", getattr(n, "attr", "")) for n in nodes} - {""}


class Reads:
    """The fields that modules read: `of_fields` holds (class, field).

    Functions called `validate` do not count: a check of a value is not a use of it.
    """

    def __init__(self, trees: list[ast.Module]):
        nodes = [node for tree in trees for node in ast.walk(tree)]
        self.classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        self.bases = {
            name: {n.id for n in node.bases if isinstance(n, ast.Name)}
            for name, node in self.classes.items()
        }
        # After Source = FileSource | TaskSource, a Source may have any of these classes.
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
                several = names_in(node.value) & set(self.classes)
                self.bases |= {x.id: several for x in node.targets if isinstance(x, ast.Name)}
        self.returns: dict[str, set[str]] = {}
        for node in nodes:
            if isinstance(node, Function):
                self.returns.setdefault(node.name, set()).update(names_in(node.returns))
        self.attributes: dict[str, Scope] = {
            name: self._declared(node) for name, node in self.classes.items()
        }
        for _ in range(2):  # an attribute may be assigned from another class's attribute
            self.of_fields: set[tuple[str, str]] = set()
            for tree in trees:
                self._block(tree.body, {}, None)

    def _declared(self, cls: ast.ClassDef) -> Scope:
        fields = {
            x.target.id: names_in(x.annotation)
            for x in cls.body
            if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
        }
        properties = [x for x in cls.body if isinstance(x, Function) and x.decorator_list]
        return fields | {x.name: names_in(x.returns) for x in properties}

    def lineage(self, name: str) -> Iterator[str]:
        """Yields a class and its base classes."""
        yield name
        for base in self.bases.get(name, ()):
            yield from self.lineage(base)

    def _block(self, body: list, scope: Scope, cls: str | None) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                self._block(node.body, dict(scope), node.name)
            elif isinstance(node, Function):
                if node.name != "validate":
                    self._function(node, scope, cls)
            else:
                self._statement(node, scope, cls)

    def _function(self, node: Function, outer: Scope, cls: str | None) -> None:
        scope = dict(outer)
        arguments = node.args
        for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            scope[a.arg] = names_in(a.annotation)
        if cls and arguments.args and arguments.args[0].arg == "self":
            scope["self"] = {cls}
        self._block(node.body, scope, cls)

    def _statement(self, node: ast.AST, scope: Scope, cls: str | None) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign):
                for target in inner.targets:
                    self._bind(target, inner.value, scope)
            elif isinstance(inner, ast.AnnAssign) and inner.value:
                self._bind(inner.target, inner.value, scope, names_in(inner.annotation))
            elif isinstance(inner, ast.NamedExpr):
                self._bind(inner.target, inner.value, scope)
            elif isinstance(inner, ast.For | ast.comprehension):
                self._bind_each(inner.target, inner.iter, scope)
            elif isinstance(inner, ast.withitem) and inner.optional_vars:
                self._bind(inner.optional_vars, inner.context_expr, scope)
        for inner in ast.walk(node):
            if isinstance(inner, Function) and inner is not node:
                self._function(inner, scope, cls)
            elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Load):
                for owner in self.types(inner.value, scope):
                    self.of_fields |= {(name, inner.attr) for name in self.lineage(owner)}

    def _bind(
        self, target: ast.AST, value: ast.AST, scope: Scope, declared: Set[str] = frozenset()
    ) -> None:
        types = declared | self.types(value, scope)
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for t, v in zip(target.elts, value.elts):
                self._bind(t, v, scope)
        elif isinstance(target, ast.Tuple | ast.List):
            for t in target.elts:
                self._bind(t, value, scope)
        elif isinstance(target, ast.Name):
            scope[target.id] = scope.get(target.id, set()) | types
        elif isinstance(target, ast.Attribute):
            for owner in self.types(target.value, scope):
                known = self.attributes.setdefault(owner, {})
                known[target.attr] = known.get(target.attr, set()) | types

    def _bind_each(self, target: ast.AST, values: ast.AST, scope: Scope) -> None:
        # An annotation names a container and its items alike, so that one set stands for both.
        items = values.args if isinstance(values, ast.Call) else [values]
        for value in items:
            self._bind(target, value, scope)

    def types(self, node: ast.AST, scope: Scope) -> set[str]:
        """Returns the classes that an expression may have, or an empty set where no annotation
        tells.
        """
        if isinstance(node, ast.Name):
            return scope.get(node.id, set())
        if isinstance(node, ast.Attribute):
            owners = [o for x in self.types(node.value, scope) for o in self.lineage(x)]
            return set().union(*(self.attributes.get(o, {}).get(node.attr, set()) for o in owners))
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in self.classes:
                return {name}
            if name == "replace" and node.args:
                return self.types(node.args[0], scope)
            return self.returns.get(name, set())
        if isinstance(node, ast.BoolOp):
            return set().union(*(self.types(x, scope) for x in node.values))
        if isinstance(node, ast.IfExp):
            return self.types(node.body, scope) | self.types(node.orelse, scope)
        if isinstance(node, ast.Subscript | ast.Starred | ast.NamedExpr):
            return self.types(node.value, scope)
        if isinstance(node, ast.Tuple | ast.List):
            return set().union(*(self.types(x, scope) for x in node.elts))
        return set()
