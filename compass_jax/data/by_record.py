"""Rows of a file by their number, read where they lie: memory does not grow with the file.

A .jsonl file is read in place. Where its lines start is found by one scan, and kept in a cache
folder as 8 bytes a line. A .gz, .zst or .parquet file has no row that can be reached without those
before it: it is unpacked once into the cache folder, as JSON lines. An ArrayRecord file has an
index of its own. What is kept is named by the file's path, size, time and parts of its content, so
that it belongs to this file as it is now.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

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

FORMAT = 2  # of what is kept: a number for each change of it
SCAN_BYTES, SCANS = 2**20, 4  # a scan reads so many blocks of this size at once, each in a thread
PARTS, PART_BYTES = 16, 4 * 2**10  # of a file's content, which its key is made of
OFFSET = np.dtype("<u8")


class FileRows(Protocol):
    """The rows of one file. `key` is the same for the same size and content, wherever it lies."""

    key: str

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> list[tuple[str, Raw]]:
        """(where, row) of each index, a DataError in the place of a row that cannot be had. Raises
        DataError where the file has changed since it was opened.
        """
        ...


def open_rows(path: str, fields: Mapping[str, str], others: Iterable[str], cache: str) -> FileRows:
    """The rows of a file by number; what must be kept for it is made first.

    Args:
        path: a file of one of the kinds that data/files.py reads.
        fields, others: as in `files.read_rows`: a Parquet file's columns.
        cache: the folder for what is kept; empty: `default_cache`.

    Raises DataError where it is no such file, is empty, is cut off, or the folder has no room.
    """
    with open_regular(path, error=DataError) as file:
        key, stamp = _key(file.fileno(), path), _stamp(file.fileno())
    if path.endswith(ARRAY_RECORDS):
        rows: FileRows = _Records(path, key, stamp)
    else:
        folder = Path(cache or default_cache())
        unique = (FORMAT, os.path.realpath(path), stamp, key, sorted(fields), sorted(others))
        name = hashlib.blake2b(json.dumps(unique).encode(), digest_size=16).hexdigest()
        plain, word = path, "line"
        if path.endswith((*CODECS, ".parquet")):
            word = "row" if path.endswith(".parquet") else word
            made = _kept(folder, f"{name}.jsonl", lambda to: _unpack(path, fields, others, to))
            plain = str(made)
        index = _kept(folder, f"{name}.lines", lambda to: _index(plain, to))
        rows = _Lines(path, plain, index, word, key)
    if not len(rows):
        raise empty_file(path)
    refuse_half_written(*rows.read([len(rows) - 1])[0])
    return rows


def default_cache() -> str:
    """compass_jax/data in the user's cache folder."""
    return os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "compass_jax", "data"
    )


class _Lines:
    def __init__(self, path: str, plain: str, index: Path, word: str, key: str):
        self.key = key
        self._path, self._plain, self._word = path, plain, word
        self._index = index
        self._count = index.stat().st_size // OFFSET.itemsize - 1
        with open_regular(plain, error=DataError) as file:
            self._opened = _stamp(file.fileno())

    def __len__(self) -> int:
        return self._count

    def read(self, indices: Sequence[int]) -> list[tuple[str, Raw]]:
        """See FileRows. The files are opened anew each time: a folder may have thousands."""
        with (
            open_regular(self._plain, error=DataError) as lines,
            open_regular(self._index, error=DataError) as index,
        ):
            _refuse_changed(lines.fileno(), self._opened, self._plain)
            return [self._line(lines.fileno(), index.fileno(), i) for i in indices]

    def _line(self, lines: int, index: int, i: int) -> tuple[str, Raw]:
        where = f"{self._path}, {self._word} {i + 1}"
        try:
            ends = os.pread(index, 2 * OFFSET.itemsize, i * OFFSET.itemsize)
            start, end = map(int, np.frombuffer(ends, OFFSET))
            if end - start > MOST_LINE_BYTES:
                return where, too_long(where)
            return where, os.pread(lines, end - start, start)
        except OSError as error:
            raise unreadable(self._path, f"at {self._word} {i + 1}", error) from error


class _Records:
    def __init__(self, path: str, key: str, stamp: tuple[int, int]):
        self.key = key
        self._path, self._opened = path, stamp
        self._source = array_records(path)

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: Sequence[int]) -> list[tuple[str, Raw]]:
        """See FileRows."""
        with open_regular(self._path, error=DataError) as file:
            _refuse_changed(file.fileno(), self._opened, self._path)
        return records_at(self._path, self._source, list(indices))


def _stamp(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


def _refuse_changed(file: int, opened: tuple[int, int], path: str) -> None:
    if _stamp(file) != opened:
        raise DataError(
            f"{path} has changed while it was read ({opened[0]:,} bytes before,"
            f" {_stamp(file)[0]:,} now): a run needs the same file from its start to its end; put"
            " the old one back, or start a new run"
        )


def _key(file: int, path: str) -> str:
    """A digest of the size and of parts of the content, evenly spread, the ends among them."""
    size = os.fstat(file).st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    try:
        for start in np.linspace(0, max(size - PART_BYTES, 0), PARTS).astype(int):
            digest.update(os.pread(file, PART_BYTES, int(start)))
    except OSError as error:
        raise unreadable(path, "at its beginning", error) from error
    return digest.hexdigest()


def _kept(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """The file of this name in the cache folder, made by one process where it is not there."""
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
    """Writes where each line starts, and where the last one ends."""
    last = 0
    with open_regular(plain, error=DataError) as lines, open(to, "wb") as index:
        opened = _stamp(lines.fileno())

        def ends_in(start: int) -> np.ndarray:
            block = np.frombuffer(os.pread(lines.fileno(), SCAN_BYTES, start), np.uint8)
            return np.flatnonzero(block == ord("\n")) + (start + 1)

        index.write(np.zeros(1, OFFSET).tobytes())
        starts = range(0, opened[0], SCAN_BYTES)
        with ThreadPoolExecutor(SCANS) as pool:
            for first in range(0, len(starts), SCANS):
                try:
                    found = list(pool.map(ends_in, starts[first : first + SCANS]))
                except OSError as error:
                    place = f"after byte {starts[first]:,}"
                    raise unreadable(plain, place, error) from error
                for ends in found:
                    index.write(ends.astype(OFFSET).tobytes())
                    last = int(ends[-1]) if len(ends) else last
        if last < opened[0]:
            index.write(np.array([opened[0]], OFFSET).tobytes())
        _refuse_changed(lines.fileno(), opened, plain)


def _unpack(path: str, fields: Mapping[str, str], others: Iterable[str], to: Path) -> None:
    with open(to, "wb") as out:
        if path.endswith(".parquet"):
            for where, row in parquet_rows(path, fields, others):
                try:
                    out.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                except TypeError as error:
                    raise DataError(
                        f"{where}: {error}; write the value as text, or leave the column out"
                    ) from error
            return
        with open_lines(path) as lines:
            while True:
                try:
                    piece = lines.read(SCAN_BYTES)
                except OSError as error:
                    place = f"after {out.tell():,} unpacked bytes"
                    raise unreadable(path, place, error) from error
                if not piece:
                    return
                out.write(piece)
