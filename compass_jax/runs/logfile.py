"""An append-only file of JSON lines, whose line count is part of a checkpoint. Nothing else may
write to it during a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from compass_jax.errors import CompassError
from compass_jax.untrusted import open_regular


class LogError(CompassError, RuntimeError):
    """A log could not be written, was changed under the run, or lacks lines; the message names the
    file and what to do.
    """


class LogFile:
    """Lines of the stages of a run, one stage after another. `count`: lines of this stage.

    `append` flushes to the operating system, `sync` to the disk. A file that was removed, replaced,
    cut or written by another process is a LogError at the next line: its lines would be lost.
    """

    def __init__(self, path: Path, stage: str):
        self.path = path
        self.stage = stage
        self.count = 0
        self._last_step = 0
        self._descriptor: int | None = None
        self._size: int | None = None  # bytes that the file must have; None: it is not there yet
        if os.path.lexists(path):
            self._repair()

    def append(self, rows: list[dict]) -> None:
        """Writes a line for each row; on LogError none of them, if the disk allows it."""
        data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        with self._told("written"):
            if self._descriptor is None:
                self._open()
            self._check()
            assert self._descriptor is not None and self._size is not None
            try:
                _write_all(self._descriptor, data)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
                raise
            self._size += len(data)
        self.count += len(rows)
        self._last_step = max([self._last_step, *(row["step"] for row in rows)])

    def sync(self) -> None:
        """Flushes the lines to the disk and closes the file: a bucket's mount stores closed files
        only.
        """
        with self._told("written"):
            if self._descriptor is None and self._size is None:
                return
            if self._descriptor is None:
                self._open()
            os.fsync(self._check())
            self.close()

    def keep_until(self, step: int, count: int) -> int:
        """Removes this stage's lines of later steps than `step`; returns how many of the `count`
        lines that should remain are missing.
        """
        if self._last_step > step:
            self._remove_after(step)
        return max(0, count - self.count)

    def close(self) -> None:
        """Closes the file; the next line opens it again. Raises LogError where the system could not
        keep what was written.
        """
        if self._descriptor is not None:
            descriptor = self._descriptor
            self._descriptor = None
            with self._told("closed"):
                os.close(descriptor)

    def _open(self) -> None:
        new = os.O_CREAT | os.O_EXCL if self._size is None else 0
        try:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | new, 0o666)
        except (FileNotFoundError, FileExistsError):
            if not self.path.parent.is_dir():
                raise
            raise self._changed(
                "it is gone" if self._size is not None else "somebody else made it"
            ) from None
        self._size = self._size or 0

    def _check(self) -> int:
        """Returns the descriptor. LogError where the path is another file than the open one."""
        assert self._descriptor is not None
        opened = os.fstat(self._descriptor)
        try:
            at_path = os.stat(self.path)
        except FileNotFoundError:
            raise self._changed("it is gone") from None
        if (at_path.st_dev, at_path.st_ino) != (opened.st_dev, opened.st_ino):
            raise self._changed("another file lies there")
        if opened.st_size != self._size:
            raise self._changed(f"it has {opened.st_size:,} bytes, {self._size:,} were written")
        return self._descriptor

    def _changed(self, how: str) -> LogError:
        remedy = (
            "the run ends here: put the file back, and the same command goes on from the "
            "last checkpoint"
        )
        return LogError(f"{self.path} was changed while the run was writing to it: {how}; {remedy}")

    def _remove_after(self, step: int) -> None:
        self.close()
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        self.count = 0
        with self._told("written"), removed_on_error(temporary):
            with open(self.path, "rb") as file, open(temporary, "wb") as out:
                for line in file:
                    own = self._step(line)
                    if own is None or own <= step:
                        out.write(line)
                        self.count += own is not None
                self._size = out.tell()
            os.replace(temporary, self.path)
        self._last_step = step

    def _repair(self) -> None:
        """Counts this stage's lines and removes a last line that a kill cut off."""
        whole = 0
        with open_regular(self.path, error=LogError) as file, self._told("read"):
            for line in file:
                if not line.endswith(b"\n"):
                    os.truncate(self.path, whole)
                    break
                whole += len(line)
                if (step := self._step(line)) is not None:
                    self.count += 1
                    self._last_step = max(self._last_step, step)
        self._size = whole

    def _step(self, line: bytes) -> int | None:
        """The step of a line of this stage; None for other and damaged lines."""
        try:
            row = json.loads(line)
            return int(row["step"]) if row["stage"] == self.stage else None
        except (ValueError, TypeError, KeyError, RecursionError):
            return None

    @contextlib.contextmanager
    def _told(self, what: str):
        """Raises an OSError as a LogError with the free space."""
        try:
            yield
        except OSError as error:
            raise LogError(
                f"{self.path} cannot be {what}{room(self.path)}: {error.strerror or error}"
            ) from error


@contextlib.contextmanager
def removed_on_error(temporary: Path) -> Iterator[None]:
    """Removes a temporary file where an error keeps it from taking its place."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def room(path: Path, ask: Callable = shutil.disk_usage) -> str:
    """Returns " (5 bytes free there)", or an empty text where that is unknown."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f" ({ask(folder).free:,} bytes free there)"
    return ""


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
