"""Source files for rewards that workers cannot import.

A function of a notebook or of a script's main module, or one inside another function, is written
with everything that its source refers to: imports, constants, and functions and classes of the same
kind. Workers then load the file. An object that cannot be written as source is refused by its name.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import math
import re
import symtable
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from compass_jax.base.aliases import JsonObject
from compass_jax.config import ConfigError

FILE = "reward.py"  # in a run's directory
POSTPONED = "from __future__ import annotations\n"
_ADVICE = (
    'write the function into a file and give its name, "my_rewards.py:score"; or let it use'
    " imports, constants and functions alone"
)


class NotWritable(ConfigError):
    """A reward refers to an object that cannot be written as source."""


def source_with_names(function: Callable[..., Any]) -> str:
    """Returns the source of a file that defines `function` and all the names that it refers to.

    Raises NotWritable, with the name of the object, if something has no source, is a lambda, or is
    a value that is neither a constant nor a compiled pattern.
    """
    name = getattr(inspect.unwrap(function), "__name__", "")
    if not name.isidentifier():
        kind = "lambda" if name else type(function).__name__
        raise NotWritable(f"reward: a {kind} cannot be written into a file; {_ADVICE}")
    writer = _Writer(name)
    writer.add(name, function)
    return writer.text()


class _Writer:
    """The parts of a file, in the order in which Python has to run them."""

    def __init__(self, reward: str):
        self._reward = reward
        self._objects: JsonObject = {}  # the value of each name of the file
        self._imports: list[str] = []
        self._parts: list[str] = []
        self._future = ""

    def text(self) -> str:
        """Returns the text of the file."""
        imports = "\n".join(self._imports)
        return "\n\n\n".join([*filter(None, [self._future + imports]), *self._parts]) + "\n"

    def add(self, name: str, value: Any) -> None:
        """Adds the definition of a name, after those of the names that it refers to."""
        if name in self._objects:
            if self._objects[name] is not value:
                raise self._error(name, "it is two objects, in two functions")
            return
        self._objects[name] = value
        if isinstance(value, ModuleType):
            self._add_import(name, value, f"import {_renamed(value.__name__, name)}")
        elif _is_importable(value):
            statement = f"from {value.__module__} import {_renamed(value.__name__, name)}"
            self._add_import(name, sys.modules[value.__module__], statement)
        elif isinstance(inspect.unwrap(value), FunctionType | type):
            self._add_definition(name, value)
        else:
            self._parts.append(f"{name} = {self._constant(name, value)}")

    def _add_import(self, name: str, module: ModuleType, statement: str) -> None:
        if getattr(module, "__spec__", None) is None:
            raise self._error(name, f"workers cannot import the module {module.__name__}")
        file, folder = getattr(module, "__file__", None), str(Path.cwd())
        # a notebook's import path has the current folder as "", which workers do not get
        path = f"sys.path.append({folder!r})"
        if file and "" in sys.path and Path(file).is_relative_to(folder) and folder not in sys.path:
            self._imports += ["import sys", "", path] if path not in self._imports else []
        self._imports.append(statement)

    def _add_definition(self, name: str, value: Any) -> None:
        core = inspect.unwrap(value)
        if core.__name__ != name:
            raise self._error(name, f"it is another name of {core.__qualname__}")
        source = self._source(name, core)
        if isinstance(core, FunctionType):
            postponed = core.__code__.co_flags & __future__.annotations.compiler_flag
            self._future = POSTPONED if postponed else self._future
        scope = _scope(core)
        for used in _free_names(self._future + source):
            if used in scope and used != name:
                self.add(used, scope[used])
        self._parts.append(source)
        for key, attribute in vars(core).items() if isinstance(core, FunctionType) else ():
            place = f"{name}.{key}"
            self._parts.append(f"{place} = {self._constant(place, attribute)}")

    def _source(self, name: str, value: Any) -> str:
        try:
            source = textwrap.dedent(_source(value))
            body = ast.parse(source).body
        except (OSError, TypeError, SyntaxError) as error:
            raise self._error(name, f"its source cannot be found ({error})") from error
        if len(body) != 1 or getattr(body[0], "name", "") != value.__name__:
            raise self._error(name, "it has no `def` of its own")
        return source.rstrip()

    def _constant(self, name: str, value: Any) -> str:
        """Returns an expression for a value. Sets are sorted: equal rewards give equal files."""
        if isinstance(value, re.Pattern):
            self.add("re", re)
            return f"re.compile({value.pattern!r}, {value.flags})"
        if type(value) is float and not math.isfinite(value):
            return f"float({str(value)!r})"
        text = expression = repr(value)
        if type(value) in (set, frozenset) and value:
            text = f"{{{', '.join(sorted(map(repr, value)))}}}"
            expression = text if isinstance(value, set) else f"frozenset({text})"
        try:
            read = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            read = NotWritable
        if type(read) not in (type(value), set) or read != value:
            raise self._error(name, f"a {type(value).__name__} cannot be written as source")
        return expression

    def _error(self, name: str, reason: str) -> NotWritable:
        subject = "" if name == self._reward else f"it uses {name}: "
        return NotWritable(f"reward = {self._reward}: {subject}{reason}; {_ADVICE}")


def _source(value: Any) -> str:
    """Returns the source of a function, or of a class with methods: inspect finds no class of a
    notebook, but the file of a method.
    """
    if not isinstance(value, type):
        return inspect.getsource(value)
    for method in vars(value).values():
        code = getattr(inspect.unwrap(method), "__code__", None)
        if code is None:
            continue
        text = "".join(linecache.getlines(code.co_filename))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                if first <= code.co_firstlineno <= (node.end_lineno or first):
                    return "".join(text.splitlines(True)[first - 1 : node.end_lineno])
    return inspect.getsource(value)


def _renamed(imported: str, name: str) -> str:
    return imported if imported == name else f"{imported} as {name}"


def _is_importable(value: Any) -> bool:
    """Returns whether `from module import name` gives this object."""
    name, place = getattr(value, "__name__", None), getattr(value, "__module__", None)
    if not isinstance(name, str) or not isinstance(place, str) or place == "__main__":
        return False
    module = sys.modules.get(place)
    return getattr(module, "__spec__", None) is not None and getattr(module, name, None) is value


def _scope(value: Any) -> JsonObject:
    """Returns the objects that the source of a function or class may refer to, by name."""
    functions = [value] if isinstance(value, FunctionType) else [*vars(value).values()]
    scope = dict(vars(sys.modules[value.__module__])) if isinstance(value, type) else {}
    for function in functions:
        if isinstance(function, FunctionType):
            scope |= {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    return scope


def _free_names(source: str) -> list[str]:
    """Returns the names that a definition takes from outside, in a fixed order."""
    top = symtable.symtable(source, FILE, "exec")
    names = {x.get_name() for x in top.get_symbols() if x.is_referenced()}
    tables = list(top.get_children())
    while tables:
        table = tables.pop()
        names |= {x.get_name() for x in table.get_symbols() if x.is_global()}
        tables += table.get_children()
    return sorted(names)
