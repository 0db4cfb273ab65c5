"""The errors of what a person gave: a setting, or a Python file that a setting names."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from compass_jax.errors import UserError


class ConfigError(UserError):
    """A setting that cannot be used; the message names the key, the value and what is allowed."""


def check(ok: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `ok`."""
    if not ok:
        raise ConfigError(message)


@contextlib.contextmanager
def of_file(path: Path) -> Iterator[None]:
    """What a person's own Python file raises, as a ConfigError with the file and its line."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}{_line(error, path)}: {error}") from error
    except (Exception, SystemExit) as error:
        # not the file's, but a signal's
        if isinstance(error, SystemExit) and not _line(error, path):
            raise
        name = type(error).__name__
        raise ConfigError(f"{path}{_line(error, path)}: {name}: {first_line(error)}") from error


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


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where it has none."""
    return (str(error).strip() or type(error).__name__).split("\n")[0][:300]
