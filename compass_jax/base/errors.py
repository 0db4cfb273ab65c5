"""The base classes of this project's errors."""

from __future__ import annotations

from typing import ClassVar

# exit status of a command that ended because its rewards carry no information (--strict)
STRICT = 3


class CompassError(Exception):
    """An error whose message names the problem, its place and the remedy. A command prints the
    message only, without a traceback.

    `exit_status` is the command's: 1 for a failed run, 2 for wrong input.
    """

    exit_status: ClassVar[int] = 1


class UserError(CompassError, ValueError):
    """A setting, file, folder or weights that cannot be used."""

    exit_status = 2
