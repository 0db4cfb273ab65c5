"""A folder that appears under its final name only when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compass_jax.families.raw import WeightsError


def check_new(folder: Path) -> None:
    """Raises WeightsError if `folder` exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} already exists: choose another name, or remove it")


@contextmanager
def new_folder(folder: Path, size: int, replace: bool = False) -> Iterator[Path]:
    """Yields an empty temporary folder next to `folder`, which is renamed at the end of the block.

    An error in the block removes the temporary folder. After a kill, the next start removes it.

    Args:
        folder: the absolute path of the folder.
        size: bytes of weights to be written, for the message of a full disk.
        replace: replaces an existing folder; otherwise a folder that is not empty is refused.

    Raises WeightsError if the folder exists, and for an OSError in the block.
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
        problem = f"{error.strerror or error} ({size:,} bytes of weights, {free:,} bytes free)"
        raise WeightsError(
            f"{folder} could not be written: {problem}; nothing was left behind"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, folder: Path) -> None:
    """Renames the complete folder; moves a folder that it replaces out of the way first."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)
