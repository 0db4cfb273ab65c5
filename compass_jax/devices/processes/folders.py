"""Removal of folders that hostile code has filled."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o700


def empty_folder(path: str) -> None:
    """Removes all files and folders in a folder, without following links. Raises OSError.

    Neither the depth of the folders nor their permissions matter: there is no recursion, and one
    folder is open at a time. No other process may change the folder meanwhile.
    """
    os.chmod(path, _MODE)
    current = os.open(path, _FOLDER)
    names: list[str] = []  # of the folders between `path` and the current one
    pending = [iter(os.listdir(current))]
    try:
        while pending:
            name = _remove_files(current, pending[-1])
            if name is not None:
                os.chmod(name, _MODE, dir_fd=current)
                current = _moved(current, name)
                names.append(name)
                pending.append(iter(os.listdir(current)))
                continue
            pending.pop()
            if names:
                current = _moved(current, "..")
                os.rmdir(names.pop(), dir_fd=current)
    finally:
        os.close(current)


def _remove_files(folder: int, names: Iterator[str]) -> str | None:
    """Removes files until the next folder, whose name it returns, or the end."""
    for name in names:
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return name
        os.unlink(name, dir_fd=folder)
    return None


def _moved(folder: int, name: str) -> int:
    """Returns a descriptor of a folder next to another, whose descriptor it closes."""
    opened = os.open(name, _FOLDER, dir_fd=folder)
    os.close(folder)
    return opened


def remove_folder(path: str) -> None:
    """Removes a folder with its content as far as possible."""
    with contextlib.suppress(OSError):
        empty_folder(path)
        os.rmdir(path)
