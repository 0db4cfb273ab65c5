"""Runs of a row's tests: on a program, and before a run without a program."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.rewards.verifiers.program_objects import (
    Link,
    ProgramClass,
    ProgramFailed,
    Reference,
    RowError,
    StartsProcesses,
)
from compass_jax.rewards.verifiers.program_tests import (
    BUILTINS,
    PROGRAM_MODULE,
    RowTest,
    RowTests,
    brief,
    defined_names,
)


class Run:
    """Runs a row's tests on a program. `ask` sends a request to the program and returns its answer
    (program_child.py). With `in_place`, all calls return the changes to their arguments.
    """

    def __init__(self, tests: RowTests, ask: Callable[[JsonObject], Any], in_place: bool = False):
        self._tests = tests
        self.link = Link(ask, in_place)
        self._defined: set[str] = set()

    def load(self, text: str) -> None:
        """Loads a program, as `RowTests.program` returns it. Raises ProgramFailed."""
        classes = [name for name, x in self._tests.namespace().items() if isinstance(x, type)]
        claimed = self.link.load(text, classes)
        # names that its process claims and that its text does not define are ignored
        self._defined = {name for name in defined_names(text) if not name.startswith("__")}
        self._defined &= {*claimed}

    def passes(self, number: int) -> bool:
        """Returns whether a test passes. Raises RowError if the outcome does not depend on the
        program, and StartsProcesses.

        After the program ended, hung or wrote malformed output, every test fails, even if a test
        catches the error.
        """
        if self.link.failure is not None:
            return False
        test, names = self._tests.tests[number - 1], self._tests.namespace()
        reserved = names.keys() | (BUILTINS - self._tests.under_test)
        self.link.begin(names)
        try:
            visible = self.link.read(sorted(test.free & self._defined - reserved))
            imported = self.link.read(sorted(test.imported & self._defined))
        except ProgramFailed:
            return False
        return self.passes_with(number, {**names, **visible}, imported)

    def passes_with(self, number: int, names: JsonObject, imported: JsonObject) -> bool:
        """Returns whether a test passes that sees these names, and imports these of the program."""
        link, test = self.link, self._tests.tests[number - 1]
        available = names.keys() | (BUILTINS - self._tests.under_test)
        # the program has all that the test takes from it
        complete = test.free <= available and test.imported <= imported.keys()
        error = _error_of(test, names, imported)
        if link.fault is not None:
            raise link.fault
        if isinstance(link.failure, StartsProcesses):
            raise link.failure
        if isinstance(error, RowError):
            raise error
        untouched = complete and not link.calls
        if error is None and untouched:
            raise RowError(f"test {number} calls no function of a program: any would pass it")
        if error is None:
            return link.calls > 0 and not link.failed and link.failure is None
        # a program may have removed the test's files
        is_rows = untouched and not isinstance(error, OSError)
        is_programs = any(error is raised for raised in link.raised)
        if not is_programs and (is_rows or isinstance(error, ImportError)):
            raise RowError(
                f"test {number} raises {brief(error)} whatever the program is; mend it, or install"
                " what it imports"
            ) from error
        return False


def _error_of(test: RowTest, names: JsonObject, imported: JsonObject) -> BaseException | None:
    """Returns the exception that a test raises, or None if it passes."""
    module = ModuleType(PROGRAM_MODULE)
    vars(module).update(imported)
    try:
        with _imported(module, bool(test.imported)):
            exec(test.code, names)
    except BaseException as error:
        return error
    return None


@contextmanager
def _imported(module: ModuleType, is_used: bool) -> Iterator[None]:
    """Makes the program importable by a test."""
    before = sys.modules.get(module.__name__)
    if is_used:
        sys.modules[module.__name__] = module
    try:
        yield
    finally:
        if is_used and before is None:
            del sys.modules[module.__name__]
        elif before is not None:
            sys.modules[module.__name__] = before


class _ReachedProgram(BaseException):
    """A test reached its first call of the program."""


def complaint(tests: RowTests) -> str:
    """Returns the fault of tests that are tried without a program; empty if each of them reaches
    its first call of a program.
    """
    try:
        for number, test in enumerate(tests.tests, 1):
            for name in sorted(test.modules - {PROGRAM_MODULE}):
                if importlib.util.find_spec(name) is None:
                    raise RowError(
                        f"test {number} imports {name}, which is not installed; install it"
                    )
            _try_without_program(tests, test, number)
    except RowError as error:
        return str(error)
    return ""


class _Unknown(ProgramClass):
    """The place of a program's object. Each use of it is a request."""

    __slots__ = ()

    def _compared(self, value: Any) -> Any:
        return self._compass.link.request("compare", (self,))

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compared
    __instancecheck__ = __subclasscheck__ = __contains__ = _compared  # type: ignore[assignment]
    __hash__ = ProgramClass.__hash__


def _try_without_program(
    tests: RowTests, test: RowTest, number: int, has_errors: bool = False
) -> None:
    """Raises RowError for a test that does not reach a call of the program. With `has_errors`, the
    program's names that begin with a capital are classes of exceptions.
    """

    def reached(request: Json) -> None:
        raise _ReachedProgram

    run = Run(tests, reached)
    names = tests.namespace()
    run.link.begin(names)

    def objects(names: Iterable[str]) -> JsonObject:
        return {name: _place(run.link, name, has_errors) for name in names}

    called = [x for x in test.free if x in tests.under_test or x not in names.keys() | BUILTINS]
    try:
        run.passes_with(number, {**names, **objects(called)}, objects(test.imported))
    except RowError:
        if run.link.calls and run.link.fault is None:
            return
        if has_errors or not any(name[:1].isupper() for name in (*called, *test.imported)):
            raise
        _try_without_program(tests, test, number, has_errors=True)


def _place(link: Link, name: str, is_error: bool) -> Any:
    if is_error and name[:1].isupper():
        return type(name, (Exception,), {})
    return _Unknown(Reference(link, 0, name, True))
