"""The tests of a row: Python texts that call a program's functions and raise if one fails.

A test sees Python's builtins, the names that `setup` defines, and those functions of the program
that neither of them defines. A program therefore cannot replace `abs` or a helper of its test. The
exception is the function under test: if `setup` has a stub of it, the test calls the program's.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import symtable
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

from compass_jax.aliases import Json, JsonMapping, JsonObject
from compass_jax.errors import CompassError
from compass_jax.verifiers.program_child import decode, encode

_BUILTINS = frozenset(dir(builtins))
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)
_UNUSED = "__unused__"  # name of `unused` in tests
IN_PLACE = "_compass_in_place"  # attribute of a program's function that `unused` returns


class RowError(CompassError, ValueError):
    """A row that no program can pass or fail, because its setup or a test cannot run."""


class ProgramFailed(CompassError):
    """The program ended, hung, or wrote malformed output; the message has the details."""


class StartsProcesses(CompassError):
    """The program was killed when it started a process, which its limits forbid."""


class RowTest(NamedTuple):
    """A compiled test."""

    code: CodeType
    free: frozenset[str]  # names that it reads but does not define
    modules: frozenset[str]  # modules that it imports


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
        if self.setup == self.begin or _compiles(joined):
            return joined
        return joined_program(self.setup, text)

    def namespace(self) -> JsonObject:
        """Returns the names that a test starts with. Raises RowError if the setup raises."""
        names: JsonObject = {"__name__": "tests"}
        try:
            exec(self.code, names)
        except BaseException as error:
            raise RowError(
                f"setup raises {_brief(error)} without a program; mend it, or install what it"
                " imports"
            ) from error
        names[_UNUSED] = in_place_variant
        return {name: value for name, value in names.items() if name not in self.under_test}

    def visible(self, claimed: Sequence[str], text: str, names: JsonMapping) -> list[str]:
        """Returns the functions of the program `text` that a test sees: those that its process
        claims, that its text defines, and that are not among the `names` of the test.
        """
        reserved = names.keys() | (_BUILTINS - self.under_test)
        defined = {name for name in defined_names(text) if not name.startswith("__")}
        return [name for name in claimed if name in defined - reserved]


def joined_program(setup: str, text: str) -> str:
    """Returns a setup and a program's text as one program. Imports from `__future__`, which Python
    accepts only at the beginning, are moved there.
    """
    parts = [_split_future(part) for part in (setup, text)]
    return "".join(future for future, _ in parts) + "\n".join(rest for _, rest in parts)


def _split_future(text: str) -> tuple[str, str]:
    """Returns a valid program's imports from `__future__`, and the rest of its text."""
    if "__future__" not in text or not _compiles(text):
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


def _test(text: Json, number: int, known: set[str], in_place: bool | None) -> RowTest:
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


def _read(reader: Callable[[Any], Any], source: Json, what: str) -> Json:
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


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


class Run:
    """Runs a row's tests on a program. `ask` sends a request to the program and returns its answer
    (program_child.py). With `in_place`, all calls return the changes to their lists, sets and
    dicts; else only calls whose result the test does not use.
    """

    def __init__(self, tests: RowTests, ask: Callable[[JsonObject], Any], in_place: bool):
        self._tests, self._ask, self._in_place = tests, ask, in_place
        self.failure: ProgramFailed | StartsProcesses | None = None  # it can answer no more calls
        self._start({})

    def _start(self, names: JsonObject) -> None:
        self._names = names
        self.calls = 0  # number of calls of the program's functions
        self._failed = False  # whether a call had no transferable result
        self._raised: BaseException | None = None  # the program's last exception
        self.fault: RowError | None = None  # kept here because a test may catch it

    def passes(self, number: int, names: JsonObject, functions: Iterable[str]) -> bool:
        """Returns whether a test passes that sees the row's `names` and these functions of the
        program. Raises RowError if the outcome does not depend on the program, and StartsProcesses.

        After the program ended, hung or wrote malformed output, every test fails, even if a test
        catches the error.
        """
        if self.failure is not None:
            return False
        self._start(names)
        test = self._tests.tests[number - 1]
        names = {**names, **{name: self._function(name) for name in functions}}
        available = names.keys() | (_BUILTINS - self._tests.under_test)
        complete = test.free <= available  # the program has all functions that the test calls
        error: BaseException | None = None
        try:
            exec(test.code, names)
        except BaseException as caught:
            error = caught
        if self.fault is not None:
            raise self.fault
        if isinstance(self.failure, StartsProcesses):
            raise self.failure
        untouched = complete and not self.calls
        if error is None and untouched:
            raise RowError(f"test {number} calls no function of a program: any would pass it")
        if error is None:
            return self.calls > 0 and not self._failed and self.failure is None
        if error is not self._raised and (untouched or isinstance(error, ImportError)):
            raise RowError(
                f"test {number} raises {_brief(error)} whatever the program is; mend it, or install"
                " what it imports"
            ) from error
        return False

    def _function(self, name: str) -> Callable[..., Json]:
        def call(*args: Json, **kwargs: Json) -> Json:
            return self._call(name, args, kwargs, self._in_place)

        def changing(*args: Json, **kwargs: Json) -> Json:
            return self._call(name, args, kwargs, True)

        call.__name__ = name
        setattr(call, IN_PLACE, changing)
        return call

    def _call(self, name: str, args: tuple[Json, ...], kwargs: JsonObject, in_place: bool) -> Json:
        self.calls += 1
        if self.failure is not None:
            raise self.failure
        try:
            request = [name, encode(list(args)), encode(kwargs), in_place]
        except TypeError as error:
            message = f"a test calls the program with what is no plain data: {error}"
            self.fault = RowError(message)
            raise self.fault from error
        except ValueError as error:
            self._failed = True
            raise ProgramFailed(f"it cannot be called: {error}") from error
        try:
            result = _result(self._ask({"call": request}), self._names)
        except (ProgramFailed, StartsProcesses) as error:
            self.failure = error
            raise
        except Exception as error:
            self.failure = ProgramFailed("it wrote a malformed answer")
            raise self.failure from error
        if isinstance(result, BaseException):
            self._raised = result
            self._failed = self._failed or isinstance(result, ProgramFailed)
            raise result
        value, after = result
        if in_place:
            for argument, changed in zip([*args, *kwargs.values()], after):
                _update(argument, changed)
        return value


def _result(answer: JsonMapping, known: JsonMapping) -> tuple[Any, list] | BaseException:
    """Returns the result of a call and its arguments afterwards, or the raised exception."""
    if "raised" in answer:
        return _exception(answer, known)
    if "unsendable" in answer:
        return ProgramFailed(f"it returned no plain data: {answer['unsendable']!s:.200}")
    after = decode(answer["after"])
    if not isinstance(after, list):
        raise TypeError
    return decode(answer["value"]), after


def _update(argument: Json, changed: Json) -> None:
    if type(argument) is not type(changed):
        return
    if isinstance(argument, list):
        argument[:] = changed
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(changed)


def _exception(answer: JsonMapping, known: JsonMapping) -> BaseException:
    """Returns the exception that the program claims to have raised. Its class is the first one that
    the row's setup or Python defines.
    """
    text = str(answer.get("text", ""))
    args = decode(answer["args"]) if "args" in answer else [text]
    names = [name for name in answer["raised"] if isinstance(name, str)]
    for name in names:
        kind = known.get(name, getattr(builtins, name, None))
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            continue
        if issubclass(kind, StopIteration | StopAsyncIteration):
            break  # as in a generator: it would end a test's loop
        with contextlib.suppress(Exception):
            return kind(*args)
    return RuntimeError(f"{names[:1]}: {text}")


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
    def reached(request: Json) -> None:
        raise _ReachedProgram

    names = tests.namespace()
    called = [x for x in test.free if x in tests.under_test or x not in names.keys() | _BUILTINS]
    run = Run(tests, reached, False)
    try:
        run.passes(number, names, called)
    except RowError:
        if not run.calls or run.fault is not None:
            raise
