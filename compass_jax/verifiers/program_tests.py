"""The tests of a row: Python texts that call a program's functions and raise if one fails.

A test sees Python's builtins, the names that `setup` defines, and those functions of the program
that neither of them defines. A program therefore cannot replace `abs` or a helper of its test. The
exception is the function under test: if `setup` has a stub of it, the test calls the program's.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import symtable
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

from compass_jax.errors import CompassError
from compass_jax.verifiers.program_child import encode

_BUILTINS = frozenset(dir(builtins))
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)
_UNUSED = "__unused__"  # name of `unused` in tests
NOT_PLAIN = "a test calls the program with what is no plain data: {}"
IN_PLACE = "_compass_in_place"  # attribute of a program's function that `unused` returns


class RowError(CompassError, ValueError):
    """A row that no program can pass or fail, because its setup or a test cannot run."""


class RowTest(NamedTuple):
    """A compiled test.

    Args:
        code: compiled statements.
        free: names that it reads but does not define.
        modules: modules that it imports.
    """

    code: CodeType
    free: frozenset[str]
    modules: frozenset[str]


class RowTests(NamedTuple):
    """The tests of a row.

    Args:
        begin: the row's setup; a program may continue its last function.
        setup: the setup, completed to a valid program.
        code: the compiled setup.
        tests: the compiled tests.
        under_test: names that a test takes from the program although setup or Python define them.
    """

    begin: str
    setup: str
    code: CodeType
    tests: tuple[RowTest, ...]
    under_test: frozenset[str]

    def program(self, text: str) -> str:
        """Returns the setup and a program's text as one program. The text may be the rest of the
        setup's last function.
        """
        joined = f"{self.begin}\n{text}"
        return joined if self.setup == self.begin or _compiles(joined) else f"{self.setup}\n{text}"

    def namespace(self) -> dict[str, Any]:
        """Returns the names that a test starts with. Raises RowError if the setup raises."""
        names: dict[str, Any] = {"__name__": "tests"}
        try:
            exec(self.code, names)
        except BaseException as error:
            raise RowError(
                f"setup raises {_brief(error)} without a program; mend it, or install what it"
                " imports"
            ) from error
        names[_UNUSED] = unused
        return {name: value for name, value in names.items() if name not in self.under_test}

    def visible(self, claimed: Sequence[str], text: str, names: Mapping[str, Any]) -> list[str]:
        """Returns the program's functions that a test sees.

        Args:
            claimed: functions that the program's process claims to have.
            text: the program; names that it does not define are ignored.
            names: the names that the test starts with.
        """
        reserved = names.keys() | (_BUILTINS - self.under_test)
        defined = {name for name in defined_names(text) if not name.startswith("__")}
        return [name for name in claimed if name in defined - reserved]


def unused(function: Any) -> Any:
    """Returns `function` in the variant for statements that ignore its result. A program's function
    then returns the changes of its arguments.
    """
    return getattr(function, IN_PLACE, function)


def read_tests(
    tests: Sequence[str], setup: str = "", entry_point: str = "", in_place: bool | None = None
) -> RowTests:
    """Compiles a row's tests.

    Args:
        tests: Python texts.
        setup: Python text that runs before each test and is prepended to the program.
        entry_point: the function under test; empty: the functions of `setup` without a body.
        in_place: None: calls whose result is unused are marked (`unused`).

    Raises:
        RowError: a text does not compile, or cannot call a program.
    """
    for name, value in (("setup", setup), ("entry_point", entry_point)):
        if not isinstance(value, str):
            raise RowError(f"{name} is a {type(value).__name__}: write text")
    if entry_point and not entry_point.isidentifier():
        raise RowError(f"entry_point = {entry_point!r:.80} must be the name of a function")
    full_setup = _complete_setup(setup)
    defined = defined_names(full_setup)
    compiled = tuple(_test(text, n, defined, in_place) for n, text in enumerate(tests, 1))
    under_test = frozenset({entry_point} if entry_point else _stubs(full_setup))
    free = frozenset[str]().union(*(one.free for one in compiled))
    if not under_test and free and not free - _BUILTINS - defined:
        functions = [name for name in free & _BUILTINS if callable(getattr(builtins, name))]
        if len(functions) != 1:
            raise RowError(
                "the tests call no function but Python's builtins and those of setup: name the"
                " function under test as entry_point"
            )
        under_test = frozenset(functions)
    return RowTests(setup, full_setup, _compile(full_setup, "setup"), compiled, under_test)


def _test(text: Any, number: int, known: set[str], in_place: bool | None) -> RowTest:
    what = f"test {number}"
    if not isinstance(text, str):
        raise RowError(f"{what} is a {type(text).__name__}: tests must be a list of texts")
    tree = _parse(text, what)
    free = frozenset(_names(text, defined=False))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name in free - known - _BUILTINS and not node.attr.startswith("__"):
                raise RowError(
                    f"{what} reads {name}.{node.attr}, and neither the test nor setup defines"
                    f" {name}: import it in setup (a program's functions have no attributes)"
                )
    modules = frozenset(_imports(tree))
    if in_place is None:
        tree = ast.fix_missing_locations(_Statements().visit(tree))
    return RowTest(_compile(tree, what), free, modules)


class _Statements(ast.NodeTransformer):
    """Marks calls whose result is unused."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        """Marks a call that is a whole statement."""
        if isinstance(call := node.value, ast.Call):
            call.func = ast.Call(ast.Name(_UNUSED, ast.Load()), [call.func], [])
        return node


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
    return _read(lambda text: compile(text, what, "exec"), source, what)


def _read(reader: Callable[[Any], Any], source: Any, what: str) -> Any:
    """Returns the result of `reader` for Python text. Raises RowError for other text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes in strings
            return reader(source)
    except _UNREADABLE as error:
        raise RowError(f"{what} does not compile: {_brief(error)}; mend it") from error


def _compiles(text: str) -> bool:
    try:
        _compile(text, "program")
    except RowError:
        return False
    return True


def _complete_setup(setup: str) -> str:
    """Returns `setup` as a valid program. If it ends with the head of a function, `pass` is added
    as the body. Raises RowError for any other invalid text.
    """
    if _compiles(setup):
        return setup
    last = (setup.rstrip().splitlines() or [""])[-1]
    indent = last[: len(last) - len(last.lstrip())]
    for blanks in (f"{indent}    ", f"{indent}\t", indent):
        if _compiles(completed := f"{setup.rstrip()}\n{blanks}pass\n"):
            return completed
    return _compile(setup, "setup") and setup


def _stubs(setup: str) -> Iterator[str]:
    """Yields the names of functions whose body is only a docstring, `pass` or `...`."""
    for node in _parse(setup, "setup").body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and all(
            map(_is_stub, node.body)
        ):
            yield node.name


def _is_stub(node: ast.stmt) -> bool:
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    raised = node.exc if isinstance(node, ast.Raise) else None
    raised = raised.func if isinstance(raised, ast.Call) else raised
    unwritten = isinstance(raised, ast.Name) and raised.id == "NotImplementedError"
    return isinstance(node, ast.Pass) or constant or unwritten


def defined_names(text: str) -> set[str]:
    """Returns the names that a text defines at its top level; an empty set if it does not
    compile.
    """
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


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


class Run:
    """The run of a test.

    Args:
        test: one of `tests`.
        names: the row's names that the test sees.
    """

    def __init__(self, tests: RowTests, test: RowTest, names: dict[str, Any]):
        self._tests, self._test, self.names = tests, test, names
        self.calls = 0  # number of calls of the program's functions
        self.failed = False  # whether a call had no transferable result
        self.raised: BaseException | None = None  # the program's last exception
        self.fault: RowError | None = None  # kept here because a test may catch it

    def passes(self, number: int, functions: Mapping[str, Callable[..., Any]]) -> bool:
        """Runs the test with a program's functions and returns whether it passes. Raises RowError
        if the outcome does not depend on the program.
        """
        names = {**self.names, **functions}
        available = names.keys() | (_BUILTINS - self._tests.under_test)
        complete = self._test.free <= available  # the program has all functions that the test calls
        error: BaseException | None = None
        try:
            exec(self._test.code, names)
        except BaseException as caught:
            error = caught
        if self.fault is not None:
            raise self.fault
        untouched = complete and not self.calls
        if error is None and untouched:
            raise RowError(f"test {number} calls no function of a program: any would pass it")
        if error is None:
            return self.calls > 0 and not self.failed
        if error is not self.raised and (untouched or isinstance(error, ImportError)):
            raise RowError(
                f"test {number} raises {_brief(error)} whatever the program is; mend it, or install"
                " what it imports"
            ) from error
        return False


class _ReachedProgram(BaseException):
    """A test reached its first call of the program."""


def complaint(tests: RowTests) -> str:
    """Returns the fault of tests that are tried without a program; empty if each of them reaches
    its first call of a program.
    """
    try:
        for number, test in enumerate(tests.tests, 1):
            for name in sorted(test.modules):
                if importlib.util.find_spec(name) is None:
                    raise RowError(
                        f"test {number} imports {name}, which is not installed; install it"
                    )
            _try_without_program(tests, test, number)
    except RowError as error:
        return str(error)
    return ""


def _try_without_program(tests: RowTests, test: RowTest, number: int) -> None:
    def reached(*args: Any, **kwargs: Any) -> None:
        run.calls += 1
        try:
            encode([args, kwargs])
        except TypeError as error:
            run.fault = run.fault or RowError(NOT_PLAIN.format(error))
        raise _ReachedProgram

    names = tests.namespace()
    called = [x for x in test.free if x in tests.under_test or x not in names.keys() | _BUILTINS]
    run = Run(tests, test, names)
    try:
        run.passes(number, dict.fromkeys(called, reached))
    except RowError:
        if not run.calls or run.fault is not None:
            raise
