"""An append-only file of JSON lines, whose line count is part of a checkpoint.

On a bucket an object cannot be appended to: the mount downloads it again when a closed file is
opened, and uploads all of it when it is closed. There a log is in parts of a number of steps: after
metrics.jsonl come metrics.00000050.jsonl, with the lines after step 50, and so on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from compass_jax.base.errors import CompassError


class LogError(CompassError, RuntimeError):
    """A log could not be written or lacks lines. The message names the file and the remedy."""


BUCKETS = ("fuse.gcsfuse", "fuse.s3fs", "fuse.rclone", "fuse.mountpoint-s3", "fuse.blobfuse2")
BUCKET_STEPS = 50  # of a part on a bucket


def log_parts(path: Path) -> list[Path]:
    """Returns the existing parts of a log, in the order in which they were written."""
    digits = "[0-9]" * 8
    parts = [path, *sorted(path.parent.glob(f"{path.stem}.{digits}{path.suffix}"))]
    return [part for part in parts if part.is_file()]


def is_on_bucket(path: Path, mounts: Path = Path("/proc/mounts")) -> bool:
    """Returns whether a path is below the mount of a bucket."""
    rows = [line.split() for line in mounts.read_text().splitlines()] if mounts.exists() else ()
    kinds = {row[1]: row[2] for row in rows}
    folders = map(str, (path.absolute(), *path.absolute().parents))
    return next((kinds[x] for x in folders if x in kinds), "") in BUCKETS


class LogFile:
    """A file of the lines of a run's stages, one stage after another. `count`: lines of this stage.

    `append` flushes to the operating system, `sync` to the disk. With `part_steps` a new part
    begins after each such number of steps; parts of an earlier setting are kept.
    """

    def __init__(self, path: Path, stage: str, part_steps: int = 0):
        self.path, self.stage, self.part_steps, self.count = path, stage, part_steps, 0
        self._last_step = 0
        self._file: IO[bytes] | None = None
        parts = log_parts(path)
        self._part = parts[-1] if parts else path
        for part in parts:
            self._count_lines(part)

    def append(self, rows: list[dict]) -> None:
        """Writes a line for each row; all rows have the same step."""
        if rows:
            self._begin_part(rows[0]["step"])
        with self._system_errors():
            if self._file is None:
                self._file = open(self._part, "ab")  # noqa: SIM115  # open between lines
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
            self.count, self._last_step = 0, step
            for part in log_parts(self.path):
                self._remove_after(step, part)
            self._part = [self.path, *log_parts(self.path)][-1]
        return max(0, count - self.count)

    def close(self) -> None:
        """Closes the file; the next line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with self._system_errors():
                file.close()

    def _begin_part(self, step: int) -> None:
        """Begins another part where this one has the lines of enough steps."""
        before = (step - 1) // self.part_steps * self.part_steps if self.part_steps else 0
        now = 0 if self._part == self.path else int(self._part.stem.rpartition(".")[2])
        if before > now:
            self.close()
            self._part = self.path.with_name(f"{self.path.stem}.{before:08}{self.path.suffix}")

    def _count_lines(self, part: Path) -> None:
        """Counts this stage's lines, and removes an incomplete last line."""
        size = 0
        with self._system_errors():
            with open(part, "rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        size += len(line)
                        if (step := self._step(line)) is not None:
                            self.count, self._last_step = self.count + 1, max(self._last_step, step)
            # A line that a kill cut off would merge with the next one.
            if size < part.stat().st_size:
                os.truncate(part, size)

    def _remove_after(self, step: int, part: Path) -> None:
        with self._system_errors():
            with open(part, "rb") as file:
                steps = [self._step(line) for line in file]
            remaining = [x is None or x <= step for x in steps]
            self.count += sum(x is not None and x <= step for x in steps)
            if not any(remaining) and part != self.path:
                part.unlink()
            elif not all(remaining):
                self._keep(part, remaining)

    def _keep(self, part: Path, remaining: list[bool]) -> None:
        """Removes the lines of a part that do not remain."""
        with (
            replaced(part) as temporary,
            open(part, "rb") as file,
            open(temporary, "wb") as out,
        ):
            out.writelines(itertools.compress(file, remaining))

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
            reason = f"{room(self._part)}: {error.strerror or error}"
            raise LogError(f"{self._part} cannot be written{reason}") from error


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
