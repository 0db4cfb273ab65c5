"""Test suites of rows: classes of unittest, and functions and classes of pytest. Each test of a
suite becomes a text that defines the suite and runs this test.

pytest's fixtures of the suite, `parametrize` and `tmp_path` work. A suite that patches or observes
its own process is refused, because the program runs in another process.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import itertools
import tempfile
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compass_jax.rewards.verifiers.program_objects import RowError

RUN = "__run_test__"  # the name of `run_test` in tests
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_MAINS = ("unittest", "pytest")
_STREAMS = ("stdin", "stdout", "stderr", "argv")
_SKIPS = ("skip", "skipif", "xfail", "skipIf", "skipUnless", "expectedFailure")


def split_suite(text: str) -> list[str]:
    """Returns a text for each test of a suite; the text itself if it is no suite, or does not
    compile.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [text]
    fixtures = [name for node in tree.body if (name := _drop_fixture(node))]
    tree.body = [node for node in tree.body if not _is_main(node)]
    calls = [
        f"{RUN}({', '.join(target)}{', ' if target else ''}{_mapping(fixtures)})"
        for node in tree.body
        for target in _tests(node)
    ]
    called = {call.func.id for call in _top_calls(tree)}
    if not calls or called & {node.name for node in tree.body if hasattr(node, "name")}:
        return [text]
    suite = ast.unparse(tree)
    return [f"{suite}\n{call}" for call in calls]


def _mapping(names: Sequence[str]) -> str:
    return "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"


def _tests(node: ast.stmt) -> Iterator[tuple[str, ...]]:
    """Yields the arguments of `run_test` for each test that a statement defines."""
    if isinstance(node, _FUNCTION):
        if node.name.startswith("test"):
            yield (node.name,)
    elif isinstance(node, ast.ClassDef):
        bases = [getattr(base, "attr", getattr(base, "id", "")) for base in node.bases]
        if node.name.startswith("Test") or any(base.endswith("TestCase") for base in bases):
            functions = (x for x in node.body if isinstance(x, _FUNCTION))
            yield from ((node.name, repr(x.name)) for x in functions if x.name.startswith("test"))


def _top_calls(tree: ast.Module) -> Iterator[Any]:
    """Yields the calls by name that are statements of a module."""
    for node in tree.body:
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            yield call


def _is_main(node: ast.stmt) -> bool:
    """Returns whether a statement runs all tests: `unittest.main()`."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    function = node.value.func
    owner = getattr(getattr(function, "value", None), "id", "")
    return owner in _MAINS and getattr(function, "attr", "") == "main"


def _drop_fixture(node: ast.stmt) -> str:
    """Removes a fixture's decorator. Returns the fixture's name; empty for another statement."""
    if not isinstance(node, _FUNCTION):
        return ""
    for decorator in node.decorator_list:
        plain = decorator.func if isinstance(decorator, ast.Call) else decorator
        if getattr(plain, "attr", getattr(plain, "id", "")) == "fixture":
            call = decorator if isinstance(decorator, ast.Call) else ast.Call(plain, [], [])
            arguments = {str(keyword.arg) for keyword in call.keywords} - {"scope"}
            if arguments or call.args:
                named = ", ".join(sorted(arguments))
                raise RowError(f"the fixture {node.name} has {named or 'arguments'}; write it out")
            node.decorator_list.remove(decorator)
            return node.name
    return ""


def process_fault(tree: ast.Module) -> str:
    """Returns how a test patches or observes its own process; empty if it does not."""
    for node in ast.walk(tree):
        name = getattr(node, "attr", getattr(node, "id", ""))
        owner = getattr(getattr(node, "value", None), "id", "")
        is_patch = name == "patch" and (isinstance(node, ast.Name) or owner in ("mock", "mocker"))
        if is_patch or name in ("redirect_stdout", "redirect_stderr"):
            return f"uses {name}"
        is_assigned = isinstance(getattr(node, "ctx", None), ast.Store)
        if is_assigned and owner == "sys" and name in _STREAMS:
            return f"sets sys.{name}"
    return ""


def run_test(owner: Any, method: str | dict, fixtures: Mapping[str, Any] | None = None) -> None:
    """Runs a test: a function, or a method of a class, with the suite's fixtures. Raises its
    failure, and RowError for a test that cannot run here.
    """
    if fixtures is None:
        assert isinstance(method, dict)
        return _run_function(owner.__name__, lambda: owner, [owner], method)
    assert isinstance(method, str)
    name, function = f"{owner.__name__}.{method}", getattr(owner, method)
    if issubclass(owner, unittest.TestCase):
        with _skips_refused(name):
            unittest.TestSuite([owner(method)]).debug()
        return None

    def bound() -> Callable:
        case = owner()
        if begin := getattr(case, "setup_method", None):
            begin(*[function] * len(inspect.signature(begin).parameters))
        return getattr(case, method)

    getattr(owner, "setup_class", lambda: None)()
    return _run_function(name, bound, [owner, function], fixtures)


@contextlib.contextmanager
def _skips_refused(name: str) -> Iterator[None]:
    try:
        yield
    except unittest.SkipTest as error:
        raise RowError(f"{name} is skipped ({error}); leave it out") from error


def _run_function(
    name: str, bound: Callable[[], Callable], marked: Sequence[Any], fixtures: Mapping[str, Any]
) -> None:
    marks = [mark for x in marked for mark in getattr(x, "pytestmark", ())]
    if skips := [mark.name for mark in marks if mark.name in _SKIPS]:
        raise RowError(f"{name} is marked {skips[0]}; leave it out")
    for values in itertools.product(*(_cases(name, x) for x in marks if x.name == "parametrize")):
        known: dict[str, Any] = {}
        for part in values:
            known |= part
        with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory(dir=".") as folder:
            known.setdefault("tmp_path", Path(folder).absolute())
            result = _supplied(name, bound(), known, fixtures, stack)
            if inspect.iscoroutine(result):
                asyncio.run(result)


def _cases(name: str, mark: Any) -> list[dict[str, Any]]:
    """Returns the arguments of each case of a `parametrize`."""
    names, values = mark.args
    if mark.kwargs.get("indirect"):
        raise RowError(f"{name} has indirect parameters; write them out")
    if isinstance(names, str):
        names = [part for x in names.split(",") if (part := x.strip())]
    cases = []
    for case in values:
        if type(case).__name__ == "ParameterSet":
            case = case.values
        elif len(names) == 1:
            case = (case,)
        cases.append(dict(zip(names, case, strict=True)))
    return cases


def _supplied(
    name: str,
    function: Callable,
    known: dict[str, Any],
    fixtures: Mapping[str, Any],
    stack: contextlib.ExitStack,
) -> Any:
    """Returns the result of a function whose parameters are known values or fixtures."""
    arguments = {}
    for parameter in inspect.signature(function).parameters.values():
        key = parameter.name
        if key not in known and key in fixtures:
            known[key] = _supplied(key, fixtures[key], known, fixtures, stack)
            if inspect.isgenerator(known[key]):
                generator = known[key]
                known[key] = next(generator)
                stack.callback(next, generator, None)
        if key in known:
            arguments[key] = known[key]
        elif parameter.default is inspect.Parameter.empty:
            raise RowError(
                f"{name} takes {key!r}, which is no fixture of the row; the program runs in another"
                " process, so that it can be neither patched nor observed: leave the row out"
            )
    return function(**arguments)
