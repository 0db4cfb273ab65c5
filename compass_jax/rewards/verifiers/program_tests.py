"""The tests of a row: Python texts that call a program's functions and raise if one fails.

A test sees Python's builtins, the names that `setup` defines, and those functions of the program
that neither of them defines. A program therefore cannot replace `abs` or a helper of its test. The
exception is the function under test: if `setup` has a stub of it, the test calls the program's.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.rewards.verifiers.program_in_place import MARK, mark_calls
from compass_jax.rewards.verifiers.program_objects import IN_PLACE, RowError
from compass_jax.rewards.verifiers.program_suites import RUN, process_fault, run_test

BUILTINS = frozenset(dir(builtins))
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)
PROGRAM_MODULE = "solution"  # the module of the program in KodCode's tests
_ENTRY = re.compile(r"([^\W\d]\w*)(?:\(\))?(?:\.[^\W\d]\w*)?")  # f, or Solution().f
# usual names of modules that are not their own
_ALIASES = {"np", "pd", "plt", "sp", "nx", "tf"}


class RowTest(NamedTuple):
    """A compiled test."""

    code: CodeType
    free: frozenset[str]  # names that it reads but does not define
    modules: frozenset[str]  # modules that it imports
    imported: frozenset[str]  # names that it imports from the program's module


class RowTests(NamedTuple):
    """The tests of a row."""

    begin: str  # the row's setup; a program may continue its last function
    setup: str  # the setup, completed to a valid program
    code: CodeType  # the compiled setup
    tests: tuple[RowTest, ...]
    # names that a test takes from the program although setup or Python define them
    under_test: frozenset[str]

    def program(self, text: str) -> str:
        """Returns the setup and a program's text as one program. The text may be the rest of the
        setup's last function.
        """
        joined = joined_program(self.begin, text)
        if self.setup == self.begin or compiles(joined):
            return joined
        return joined_program(self.setup, text)

    @property
    def needed(self) -> frozenset[str]:
        """The names that the tests take from a program."""
        free = frozenset[str]().union(*(test.free for test in self.tests))
        imported = (test.imported for test in self.tests)
        known = BUILTINS | defined_names(self.setup) | {MARK, RUN}
        return self.under_test.union(free - known, *imported)

    def namespace(self) -> JsonObject:
        """Returns the names that a test starts with. Raises RowError if the setup raises."""
        names: JsonObject = {"__name__": "tests"}
        try:
            exec(self.code, names)
        except BaseException as error:
            raise RowError(
                f"setup raises {brief(error)} without a program; mend it, or install what it"
                " imports"
            ) from error
        names |= {MARK: in_place_variant, RUN: run_test}
        return {name: value for name, value in names.items() if name not in self.under_test}


def joined_program(setup: str, text: str) -> str:
    """Returns a setup and a program's text as one program. Imports from `__future__`, which Python
    accepts only at the beginning, are moved there.
    """
    parts = [_split_future(part) for part in (setup, text)]
    return "".join(future for future, _ in parts) + "\n".join(rest for _, rest in parts)


def _split_future(text: str) -> tuple[str, str]:
    """Returns a valid program's imports from `__future__`, and the rest of its text."""
    if "__future__" not in text or not compiles(text):
        return "", text
    imports, lines = "", text.encode().splitlines(keepends=True)
    for node in reversed(_parse(text, "program").body):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            after = lines[last][node.end_col_offset :]
            lines[first : last + 1] = [lines[first][: node.col_offset] + b"pass" + after]
            imports = f"{ast.unparse(node)}\n{imports}"
    return imports, b"".join(lines).decode()


def in_place_variant(function: Json) -> Json:
    """Returns `function` in the variant for statements that ignore its result. A program's function
    then returns the changes of its arguments.
    """
    return getattr(function, IN_PLACE, function)


def read_tests(
    tests: Sequence[str], setup: str = "", entry_point: str = "", in_place: bool | None = None
) -> RowTests:
    """Compiles a row's tests. `setup` runs before each test and is prepended to the program.

    The function under test is `entry_point`; if that is empty, the functions of `setup` without a
    body. With `in_place` = None, calls whose result is unused are marked (`unused`). Raises
    RowError if a text does not compile, or cannot call a program.
    """
    for name, value in (("setup", setup), ("entry_point", entry_point)):
        if not isinstance(value, str):
            raise RowError(f"{name} is a {type(value).__name__}: write text")
    entry = _ENTRY.fullmatch(entry_point)
    if entry_point and not entry:
        raise RowError(
            f"entry_point = {entry_point!r:.80} must be the name of a function, or a method such as"
            " Solution().name"
        )
    full_setup = _complete_setup(setup)
    under_test = frozenset({entry[1]} if entry else _stubs(full_setup))
    defined = {*defined_names(full_setup), MARK, RUN}
    compiled = tuple(
        _test(text, n, defined - under_test, in_place) for n, text in enumerate(tests, 1)
    )
    free = frozenset[str]().union(*(test.free | test.imported for test in compiled))
    if not under_test and free and not free - BUILTINS - defined:
        functions = [name for name in free & BUILTINS if callable(getattr(builtins, name))]
        if len(functions) != 1:
            raise RowError(
                "the tests call no function but Python's builtins and those of setup: name the"
                " function under test as entry_point"
            )
        under_test = frozenset(functions)
    return RowTests(setup, full_setup, _compile(full_setup, "setup"), compiled, under_test)


def _test(text: Json, number: int, known: set[str], in_place: bool | None) -> RowTest:
    what = f"test {number}"
    if not isinstance(text, str):
        raise RowError(f"{what} is a {type(text).__name__}: tests must be a list of texts")
    tree = _parse(text, what)
    if fault := process_fault(tree):
        raise RowError(
            f"{what} {fault}, and the program runs in another process, which it does not reach;"
            " leave the row out"
        )
    imported = frozenset(_program_imports(tree))
    free = frozenset(_names(ast.unparse(tree), defined=False))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name in free - known - BUILTINS and name in _ALIASES | sys.stdlib_module_names:
                raise RowError(
                    f"{what} reads {name}.{node.attr}, and neither the test nor setup defines"
                    f" {name}: import it in setup"
                )
    modules = frozenset(_imports(tree))
    if in_place is None:
        tree = mark_calls(tree, (free | imported) - known - BUILTINS)
    return RowTest(_compile(tree, what), free, modules, imported)


def _program_imports(tree: ast.Module) -> Iterator[str]:
    """Yields the names that a test imports from the program's module. With `import *` the test
    reads them like functions of the program.
    """
    modules = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == PROGRAM_MODULE:
            yield from (alias.name for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Import):
            named = (alias for alias in node.names if alias.name == PROGRAM_MODULE)
            modules.update(alias.asname or alias.name for alias in named)
    tree.body = [ast.Pass() if _imports_all(node) else node for node in tree.body]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in modules:
            yield node.attr


def _imports_all(node: ast.stmt) -> bool:
    if not isinstance(node, ast.ImportFrom) or node.module != PROGRAM_MODULE:
        return False
    return any(alias.name == "*" for alias in node.names)


def _imports(node: ast.AST) -> Iterator[str]:
    """Yields the modules that a text imports outside of `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield (child.module or "").partition(".")[0]
        elif not isinstance(child, ast.Try):
            yield from _imports(child)


def _parse(text: str, what: str) -> ast.Module:
    return _read(ast.parse, text, what)


def _compile(source: str | ast.Module, what: str) -> CodeType:
    return _read(lambda text: compile(text, what, "exec", dont_inherit=True), source, what)


def _read(reader: Callable[[Any], Any], source: Json, what: str) -> Json:
    """Returns the result of `reader` for Python text. Raises RowError for other text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes in strings
            return reader(source)
    except _UNREADABLE as error:
        raise RowError(f"{what} does not compile: {brief(error)}; mend it") from error


def compiles(text: str) -> bool:
    """Returns whether a text is a valid program."""
    try:
        _compile(text, "program")
    except RowError:
        return False
    return True


def _complete_setup(setup: str) -> str:
    """Returns `setup` as a valid program. If it ends with the head of a function, `pass` is added
    as the body. Raises RowError for any other invalid text.
    """
    if compiles(setup):
        return setup
    last = (setup.rstrip().splitlines() or [""])[-1]
    indent = last[: len(last) - len(last.lstrip())]
    for blanks in (f"{indent}    ", f"{indent}\t", indent):
        if compiles(completed := f"{setup.rstrip()}\n{blanks}pass\n"):
            return completed
    return _compile(setup, "setup") and setup


def _stubs(setup: str) -> Iterator[str]:
    """Yields the names of functions whose body is only a docstring, `pass` or `...`, and of classes
    with only such methods.
    """
    for node in _parse(setup, "setup").body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            methods = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or any(
                isinstance(part, ast.FunctionDef) for part in node.body
            )
            if methods and all(map(_is_stub, node.body)):
                yield node.name


def _is_stub(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return all(map(_is_stub, node.body))
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    raised = node.exc if isinstance(node, ast.Raise) else None
    raised = raised.func if isinstance(raised, ast.Call) else raised
    unwritten = isinstance(raised, ast.Name) and raised.id == "NotImplementedError"
    return isinstance(node, ast.Pass) or constant or unwritten


def read_names(text: str) -> set[str]:
    """Returns the global names that a valid text reads and does not define."""
    return _names(text, defined=False)


def defined_names(text: str) -> set[str]:
    """Returns the names that a text defines at its top level; none if it does not compile."""
    try:
        return _names(text, defined=True)
    except _UNREADABLE:
        return set()


def _names(text: str, defined: bool) -> set[str]:
    """Returns the global names that a text defines, or those that it reads but does not define."""
    defined_here, read = set[str](), set[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tables = [symtable.symtable(text, "text", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            is_defined = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
            if is_defined and (top or symbol.is_declared_global()):
                defined_here.add(symbol.get_name())
            elif symbol.is_referenced() and (top or symbol.is_global()):
                read.add(symbol.get_name())
    return defined_here if defined else read - defined_here


def brief(error: BaseException) -> str:
    """Returns the class and the beginning of the message of an error."""
    return f"{type(error).__name__}: {str(error)[:300]}"
