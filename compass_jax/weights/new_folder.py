"""A folder that appears under its final name only when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compass_jax.devices.distributed import in_main_process, is_main_process
from compass_jax.model.families.raw import WeightsError


def check_new(folder: Path) -> None:
    """Raises WeightsError if `folder` exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} already exists: choose another name, or remove it")


@contextmanager
def new_folder(folder: Path, size: int, replace: bool = False) -> Iterator[Path]:
    """Yields an empty temporary folder next to `folder`, which is renamed at the end of the block.

    An error in the block removes the temporary folder. After a kill, the next start removes it.
    With several processes all enter the block, and the first one makes and renames the folder; an
    error in the block must be raised in all of them (`in_every_process`).

    Args:
        folder: the absolute path of the folder.
        size: bytes of weights to be written, for the message of a full disk.
        replace: replaces an existing folder; otherwise a folder that is not empty is refused.

    Raises WeightsError if the folder exists, and for an OSError in the block.
    """
    if not replace:
        in_main_process(lambda: check_new(folder))
    temporary = folder.with_name(f".{folder.name}.partial")
    try:
        in_main_process(lambda: _make_empty(temporary))
        yield temporary
        in_main_process(lambda: _publish(temporary, folder))
    except OSError as error:
        free = shutil.disk_usage(next(p for p in folder.parents if p.exists())).free
        problem = f"{error.strerror or error} ({size:,} bytes of weights, {free:,} bytes free)"
        raise WeightsError(
            f"{folder} could not be written: {problem}; nothing was left behind"
        ) from error
    finally:
        if is_main_process():
            shutil.rmtree(temporary, ignore_errors=True)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _publish(temporary: Path, folder: Path) -> None:
    """Renames the complete folder; moves a folder that it replaces out of the way first."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    # A rename cannot replace a folder that is not empty.
    if folder.exists():
        os.rename(folder, old)
    os.rename(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)
