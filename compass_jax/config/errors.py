"""Errors of user input: settings, and Python files that settings name."""

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

from compass_jax.base.aliases import Settings
from compass_jax.base.errors import UserError
from compass_jax.config.former import present_name


class ConfigError(UserError):
    """An unusable setting. The message names the key, the value and the remedy."""


def check(ok: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `ok`."""
    if not ok:
        raise ConfigError(message)


@contextlib.contextmanager
def of_file(path: Path) -> Iterator[None]:
    """Re-raises errors of a user's Python file as ConfigError, with the file and the line."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}{line_in(error, path)}: {error}") from error
    except (Exception, SystemExit) as error:
        # raised by a signal, not by the file
        if isinstance(error, SystemExit) and not line_in(error, path):
            raise
        message = _no_setting(error) or f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{path}{line_in(error, path)}: {message}") from error


def line_in(error: BaseException, path: Path) -> str:
    """Returns ", line 3" if the error's traceback has a frame of the file, or the file has a syntax
    error there; else an empty text.
    """
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
    """Returns a message with the nearest setting, if a class was called with an unknown one; else
    an empty text.
    """
    called = _UNKNOWN.search(str(error)) if isinstance(error, TypeError) else None
    if called is None:
        return ""
    name, setting = called.groups()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in (*frame.f_locals.values(), *frame.f_globals.values()):
            inside = getattr(value, name, None) if isinstance(value, ModuleType) else value
            cls: Settings = inside if isinstance(inside, type) else type(inside)
            if cls.__name__ == name and dataclasses.is_dataclass(cls):
                known = [field.name for field in dataclasses.fields(cls)]
                matches = difflib.get_close_matches(setting, known, n=1)
                hint = f"did you mean {matches[0]}?" if matches else f"it has {', '.join(known)}"
                return f"{name} has no setting {setting}; {hint}"
    return ""


def line_of(path: Path, key: str, owner: str) -> str:
    """Returns ", line 3" if exactly one call of the class `owner`, or of `replace`, in a Python
    file sets `key`; else an empty text.
    """
    name = key.rpartition(".")[2]
    lines_of_calls = {owner: [], "replace": []}  # type: dict[str, list[int]]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            lines = [word.value.lineno for word in node.keywords if word.arg == name]
            lines_of_calls.get(called, []).extend(lines)
    lines = lines_of_calls[owner] or lines_of_calls["replace"]
    return f", line {lines[0]}" if len(lines) == 1 else ""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or its class if the text is empty. Where a file
    imports a former name of a module of this package, the present name follows.
    """
    line = (str(error).strip() or type(error).__name__).split("\n")[0][:300]
    module = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    present = present_name(module)
    return f"{line}; it is {present} now" if present != module else line
