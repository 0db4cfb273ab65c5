"""A folder that appears under its name when it is whole, and not before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compass_jax.families.raw import WeightsError


def check_new(folder: Path) -> None:
    """Raises WeightsError where `folder` is there already and not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} already exists: choose another name, or remove it")


@contextmanager
def new_folder(folder: Path, size: int, replace: bool = False) -> Iterator[Path]:
    """An empty folder beside `folder`, to be filled in the block; it gets the name at its end.

    Whatever ends the block otherwise leaves nothing behind, but for a kill: what that left is
    removed by the next start.

    Args:
        folder: the absolute path that the folder gets.
        size: bytes of weights that will be written, for the message of a full disk.
        replace: takes the place of an existing folder, which otherwise is refused unless empty.

    Raises WeightsError where the folder exists, and for an OSError in the block.
    """
    if not replace:
        check_new(folder)
    temporary = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        _publish(temporary, folder)
    except OSError as error:
        free = shutil.disk_usage(next(p for p in folder.parents if p.exists())).free
        what = f"{error.strerror or error} ({size:,} bytes of weights, {free:,} bytes free)"
        raise WeightsError(
            f"{folder} could not be written: {what}; nothing was left behind"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, folder: Path) -> None:
    """Gives the whole folder its name; one that it replaces is moved aside first."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)
