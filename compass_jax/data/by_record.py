"""Random access to the rows of a file, in constant memory.

A .jsonl file is read in place, with an index of its lines in a cache folder (8 bytes per line). A
.gz, .zst or .parquet file is unpacked once into the cache folder as JSON lines. An ArrayRecord file
has its own index. The names of cache files are derived from the file's path, size, modification
time and samples of its content, so they belong to one version of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Protocol

import numpy as np
from filelock import FileLock

from compass_jax.config.files import ARRAY_RECORDS
from compass_jax.data.files import empty_file, refuse_half_written
from compass_jax.data.raw import (
    CODECS,
    DataError,
    Raw,
    array_records,
    open_lines,
    parquet_rows,
    records_at,
    too_long,
    unreadable,
)
from compass_jax.untrusted import MOST_LINE_BYTES, open_regular

FORMAT = 2  # version of the cache files
BLOCK = 2**20
PARTS, PART_BYTES = 16, 4 * 2**10  # samples of a file's content that determine its key
OFFSET = np.dtype("<u8")


class FileRows(Protocol):
    """The rows of one file. `key` is equal for files of the same size and content in any folder."""

    key: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[str, Raw]:
        """Returns (where, row); the row is a DataError if it cannot be read. Raises DataError if
        the file has changed since it was opened.
        """
        ...


def open_rows(path: str, fields: Mapping[str, str], others: Iterable[str], cache: str) -> FileRows:
    """Opens a file for random access to its rows, and first writes its cache files.

    Args:
        path: a file of a kind that data/files.py reads.
        fields, others: a Parquet file's columns, as in `files.read_rows`.
        cache: the cache folder; if empty, `default_cache`.

    Raises DataError for a file of another kind, for an empty or truncated file, and if the cache
    folder has no space.
    """
    with open_regular(path, error=DataError) as file:
        key, stamp = _key(file.fileno(), path), _stamp(file.fileno())
    if path.endswith(ARRAY_RECORDS):
        rows: FileRows = _Records(path, key, stamp)
    else:
        folder = Path(cache or default_cache())
        unique = (FORMAT, os.path.realpath(path), stamp, key, sorted(fields), sorted(others))
        name = hashlib.blake2b(json.dumps(unique).encode(), digest_size=16).hexdigest()
        plain = path
        if path.endswith((*CODECS, ".parquet")):
            unpack = lambda to: _unpack(path, fields, others, to)  # noqa: E731
            plain = str(_cached(folder, f"{name}.jsonl", unpack))
        index = _cached(folder, f"{name}.lines", lambda to: _index(plain, to))
        rows = _Lines(path, plain, index, key)
    if not len(rows):
        raise empty_file(path)
    refuse_half_written(*rows[len(rows) - 1])
    return rows


def default_cache() -> str:
    """Returns the folder compass_jax/data in the user's cache folder."""
    return os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "compass_jax", "data"
    )


class _Lines:
    def __init__(self, path: str, plain: str, index: Path, key: str):
        self.key, self._path, self._plain, self._index = key, path, plain, index
        self._word = "row" if path.endswith(".parquet") else "line"
        self._count = index.stat().st_size // OFFSET.itemsize - 1
        with open_regular(plain, error=DataError) as file:
            self._opened = _stamp(file.fileno())

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[str, Raw]:
        """Implements FileRows. Opens the files for each row, because a folder may have
        thousands.
        """
        where = f"{self._path}, {self._word} {index + 1}"
        with (
            open_regular(self._plain, error=DataError) as lines,
            open_regular(self._index, error=DataError) as offsets,
        ):
            _refuse_changed(lines.fileno(), self._opened, self._plain)
            try:
                ends = os.pread(offsets.fileno(), 2 * OFFSET.itemsize, index * OFFSET.itemsize)
                start, end = map(int, np.frombuffer(ends, OFFSET))
                if end - start > MOST_LINE_BYTES:
                    return where, too_long(where)
                return where, os.pread(lines.fileno(), end - start, start)
            except OSError as error:
                raise unreadable(self._path, f"at {self._word} {index + 1}", error) from error


class _Records:
    def __init__(self, path: str, key: str, stamp: tuple[int, int]):
        self.key, self._path, self._opened = key, path, stamp
        self._source = array_records(path)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[str, Raw]:
        with open_regular(self._path, error=DataError) as file:
            _refuse_changed(file.fileno(), self._opened, self._path)
        return records_at(self._path, self._source, [index])[0]


def _stamp(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns


def _refuse_changed(file: int, opened: tuple[int, int], path: str) -> None:
    if _stamp(file) != opened:
        raise DataError(
            f"{path} has changed while it was read ({opened[0]:,} bytes before,"
            f" {_stamp(file)[0]:,} now): a run needs the same file from its start to its end; put"
            " the old one back, or start a new run"
        )


def _key(file: int, path: str) -> str:
    """Returns a digest of the size and of evenly spaced samples of the content, including both
    ends.
    """
    size = os.fstat(file).st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    try:
        for start in np.linspace(0, max(size - PART_BYTES, 0), PARTS).astype(int):
            digest.update(os.pread(file, PART_BYTES, int(start)))
    except OSError as error:
        raise unreadable(path, "at its beginning", error) from error
    return digest.hexdigest()


def _cached(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Returns a file of the cache folder, which one process makes if it is missing."""
    target, unfinished = folder / name, folder / f"{name}.part"
    try:
        if not target.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{target}.lock"):
                if not target.is_file():
                    try:
                        make(unfinished)
                        os.replace(unfinished, target)
                    finally:
                        unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"{target} cannot be written ({error.strerror or error}): make room there, or name"
            " another folder in data.cache"
        ) from error
    return target


def _index(plain: str, to: Path) -> None:
    """Writes the start offset of each line, and the end of the last one."""
    size, ends_with_newline = 0, True
    with open_regular(plain, error=DataError) as lines, open(to, "wb") as index:
        opened = _stamp(lines.fileno())
        index.write(np.zeros(1, OFFSET).tobytes())
        for block in _blocks(lines, plain):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + (size + 1)
            index.write(ends.astype(OFFSET).tobytes())
            size, ends_with_newline = size + len(block), block.endswith(b"\n")
        if not ends_with_newline:
            index.write(np.array([size], OFFSET).tobytes())
        _refuse_changed(lines.fileno(), opened, plain)


def _blocks(file: IO[bytes], path: str) -> Iterator[bytes]:
    size = 0
    while True:
        try:
            block = file.read(BLOCK)
        except OSError as error:
            raise unreadable(path, f"after {size:,} bytes", error) from error
        if not block:
            return
        yield block
        size += len(block)


def _unpack(path: str, fields: Mapping[str, str], others: Iterable[str], to: Path) -> None:
    """Writes the rows of a compressed or Parquet file as JSON lines."""
    with open(to, "wb") as out:
        if not path.endswith(".parquet"):
            with open_lines(path) as lines:
                out.writelines(_blocks(lines, path))
            return
        for where, row in parquet_rows(path, fields, others):
            try:
                out.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            except TypeError as error:
                raise DataError(
                    f"{where}: {error}; write the value as text, or leave the column out"
                ) from error
