"""An append-only file of JSON lines, whose line count is part of a checkpoint. During a run only
the run may write to it.
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
    """A log could not be written, was changed during the run, or lacks lines. The message names the
    file and the remedy.
    """


class LogFile:
    """A file of the lines of a run's stages, one stage after another. `count`: lines of this stage.

    `append` flushes to the operating system, `sync` to the disk. If the file was removed, replaced,
    cut or written by another process, the next line raises LogError, because its lines would be
    lost.
    """

    def __init__(self, path: Path, stage: str):
        self.path = path
        self.stage = stage
        self.count = 0
        self._last_step = 0
        self._descriptor: int | None = None
        self._size: int | None = None  # expected size in bytes; None: the file does not exist yet
        if os.path.lexists(path):
            self._repair()

    def append(self, rows: list[dict]) -> None:
        """Writes a line for each row. On LogError removes them again, if the disk allows it."""
        data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        with self._system_errors("written"):
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
        """Flushes the lines to the disk and closes the file, because the mount of a bucket stores
        only closed files.
        """
        with self._system_errors("written"):
            if self._descriptor is None and self._size is None:
                return
            if self._descriptor is None:
                self._open()
            os.fsync(self._check())
            self.close()

    def keep_until(self, step: int, count: int) -> int:
        """Removes this stage's lines of steps after `step`. Returns how many of the `count` lines
        that should remain are missing.
        """
        if self._last_step > step:
            self._remove_after(step)
        return max(0, count - self.count)

    def close(self) -> None:
        """Closes the file; the next line opens it again. Raises LogError if the system could not
        store written lines.
        """
        if self._descriptor is not None:
            descriptor = self._descriptor
            self._descriptor = None
            with self._system_errors("closed"):
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
        """Returns the descriptor. Raises LogError if the path is another file than the open one."""
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
        with self._system_errors("written"), removed_on_error(temporary):
            with open(self.path, "rb") as file, open(temporary, "wb") as out:
                for line in file:
                    line_step = self._step(line)
                    if line_step is None or line_step <= step:
                        out.write(line)
                        self.count += line_step is not None
                self._size = out.tell()
            os.replace(temporary, self.path)
        self._last_step = step

    def _repair(self) -> None:
        """Counts this stage's lines, and removes an incomplete last line."""
        complete_bytes = 0
        with open_regular(self.path, error=LogError) as file, self._system_errors("read"):
            for line in file:
                if not line.endswith(b"\n"):
                    os.truncate(self.path, complete_bytes)
                    break
                complete_bytes += len(line)
                if (step := self._step(line)) is not None:
                    self.count += 1
                    self._last_step = max(self._last_step, step)
        self._size = complete_bytes

    def _step(self, line: bytes) -> int | None:
        """Returns the step of a line of this stage; None for other and damaged lines."""
        try:
            row = json.loads(line)
            return int(row["step"]) if row["stage"] == self.stage else None
        except (ValueError, TypeError, KeyError, RecursionError):
            return None

    @contextlib.contextmanager
    def _system_errors(self, what: str):
        """Re-raises an OSError as a LogError with the free space."""
        try:
            yield
        except OSError as error:
            raise LogError(
                f"{self.path} cannot be {what}{room(self.path)}: {error.strerror or error}"
            ) from error


@contextlib.contextmanager
def removed_on_error(temporary: Path) -> Iterator[None]:
    """Removes a temporary file if an error prevents its renaming."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def room(path: Path, ask: Callable = shutil.disk_usage) -> str:
    """Returns " (5 bytes free there)", or an empty text if the free space is unknown."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f" ({ask(folder).free:,} bytes free there)"
    return ""


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
