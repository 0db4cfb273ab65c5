"""An append-only file of JSON lines, whose line count is part of a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from compass_jax.base.errors import CompassError


class LogError(CompassError, RuntimeError):
    """A log could not be written or lacks lines. The message names the file and the remedy."""


class LogFile:
    """A file of the lines of a run's stages, one stage after another. `count`: lines of this stage.

    `append` flushes to the operating system, `sync` to the disk.
    """

    def __init__(self, path: Path, stage: str):
        self.path, self.stage, self.count = path, stage, 0
        self._last_step = 0
        self._file: IO[bytes] | None = None
        if path.exists():
            self._count_lines()

    def append(self, rows: list[dict]) -> None:
        """Writes a line for each row."""
        with self._system_errors():
            if self._file is None:
                self._file = open(self.path, "ab")  # noqa: SIM115  # open between lines
            self._file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
            self._file.flush()
        self.count += len(rows)
        self._last_step = max([self._last_step, *(row["step"] for row in rows)])

    def sync(self) -> None:
        """Flushes the lines to the disk and closes the file, because the mount of a bucket stores
        only closed files.
        """
        if self._file is not None:
            with self._system_errors():
                os.fsync(self._file.fileno())
            self.close()

    def keep_until(self, step: int, count: int) -> int:
        """Removes this stage's lines of steps after `step`. Returns how many of the `count` lines
        that should remain are missing.
        """
        if self._last_step > step:
            self.close()
            self._remove_after(step)
        return max(0, count - self.count)

    def close(self) -> None:
        """Closes the file; the next line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with self._system_errors():
                file.close()

    def _count_lines(self) -> None:
        """Counts this stage's lines, and removes an incomplete last line."""
        size = 0
        with self._system_errors():
            with open(self.path, "rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        size += len(line)
                        if (step := self._step(line)) is not None:
                            self.count, self._last_step = self.count + 1, max(self._last_step, step)
            # A line that a kill cut off would merge with the next one.
            if size < self.path.stat().st_size:
                os.truncate(self.path, size)

    def _remove_after(self, step: int) -> None:
        self.count = 0
        with (
            self._system_errors(),
            replaced(self.path) as temporary,
            open(self.path, "rb") as file,
            open(temporary, "wb") as out,
        ):
            for line in file:
                line_step = self._step(line)
                if line_step is None or line_step <= step:
                    out.write(line)
                    self.count += line_step is not None
        self._last_step = step

    def _step(self, line: bytes) -> int | None:
        """Returns the step of a line of this stage; None for other and damaged lines."""
        try:
            row = json.loads(line)
            return int(row["step"]) if row["stage"] == self.stage else None
        except (ValueError, TypeError, KeyError):
            return None

    @contextlib.contextmanager
    def _system_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = f"{room(self.path)}: {error.strerror or error}"
            raise LogError(f"{self.path} cannot be written{reason}") from error


@contextlib.contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Yields a temporary path, which then replaces `file` atomically; an error leaves `file` as it
    was.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def room(path: Path) -> str:
    """Returns " (5 bytes free there)", or an empty text if the free space is unknown."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f" ({shutil.disk_usage(folder).free:,} bytes free there)"
    return ""
