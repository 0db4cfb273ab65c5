"""The base classes of all errors that this project raises on purpose."""

from __future__ import annotations

from typing import ClassVar

# exit status of a command that ended because its rewards said nothing (--strict)
STRICT = 3


class CompassError(Exception):
    """An error whose message says what was wrong, where, and what to do: a command that ends with
    it says that alone, without a traceback.

    `exit_status` is the command's: 1 for what befell a run, 2 for what a person gave.
    """

    exit_status: ClassVar[int] = 1


class UserError(CompassError, ValueError):
    """Something that a person gave cannot be used: a setting, a file, a folder, weights."""

    exit_status = 2
