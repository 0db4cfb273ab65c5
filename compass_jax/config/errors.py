"""The errors of what a person gave: a setting, or a Python file that a setting names."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from compass_jax.errors import UserError


class ConfigError(UserError):
    """An unusable setting; the message names the key, the value and the remedy."""


def check(ok: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `ok`."""
    if not ok:
        raise ConfigError(message)


@contextlib.contextmanager
def of_file(path: Path) -> Iterator[None]:
    """Raises errors of a user's Python file as a ConfigError with the file and its line."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}{_line(error, path)}: {error}") from error
    except (Exception, SystemExit) as error:
        # not the file's, but a signal's
        if isinstance(error, SystemExit) and not _line(error, path):
            raise
        told = _no_setting(error) or f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{path}{_line(error, path)}: {told}") from error


def _line(error: BaseException, path: Path) -> str:
    """ ", line 3" where the file is in the error's traceback, or is what could not be parsed."""
    if (
        isinstance(error, SyntaxError)
        and error.filename
        and Path(error.filename) == path.absolute()
    ):
        return f", line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.absolute()]
    return f", line {lines[-1]}" if lines else ""


_UNKNOWN = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def _no_setting(error: BaseException) -> str:
    """The nearest setting, where a class was called with one that it does not have."""
    called = _UNKNOWN.search(str(error)) if isinstance(error, TypeError) else None
    if called is None:
        return ""
    name, given = called.groups()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in (*frame.f_locals.values(), *frame.f_globals.values()):
            inside = getattr(value, name, None) if isinstance(value, ModuleType) else value
            cls: Any = inside if isinstance(inside, type) else type(inside)
            if cls.__name__ == name and dataclasses.is_dataclass(cls):
                known = [field.name for field in dataclasses.fields(cls)]
                near = difflib.get_close_matches(given, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
                return f"{name} has no setting {given}; {hint}"
    return ""


def line_of(path: Path, key: str, owner: str) -> str:
    """ ", line 3" where a Python file gives the setting `key` to a call of the class `owner` or of
    `replace`, in one place alone.
    """
    name = key.rpartition(".")[2]
    found = {owner: [], "replace": []}  # type: dict[str, list[int]]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            lines = [word.value.lineno for word in node.keywords if word.arg == name]
            found.get(called, []).extend(lines)
    lines = found[owner] or found["replace"]
    return f", line {lines[0]}" if len(lines) == 1 else ""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or its class if the text is empty."""
    return (str(error).strip() or type(error).__name__).split("\n")[0][:300]
