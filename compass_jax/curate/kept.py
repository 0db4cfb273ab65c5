"""The kept rows: the file that they are written to, and the index that later rows are compared
with.
"""

from __future__ import annotations

import array
import bisect
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from compass_jax.config.prepare import PrepareConfig
from compass_jax.curate.duplicates import Batch, NearDuplicates
from compass_jax.curate.sample import Sample
from compass_jax.data.files import DataError, json_object
from compass_jax.data.formats import Reading, tools_of
from compass_jax.data.sft import taught

AT_ONCE = 1024  # rows


class Row(NamedTuple):
    """A row, what it says, and the line that is written of it."""

    sample: Sample
    line: bytes
    row: dict[str, Any]
    reading: Reading


def row_of(
    reading: Reading, where: str, row: dict[str, Any], line: bytes, config: PrepareConfig
) -> Row:
    """A row with what it says. Raises DataError, naming the place, where it is no conversation."""
    messages = taught(reading, where, row, "")
    sample = Sample(where, messages, tools_of(row, where), config.shingle_words)
    return Row(sample, line, row, reading)


class Kept:
    """The rows that stay, in a file that is open for writing; a context manager."""

    def __init__(self, path: Path, config: PrepareConfig):
        self.path = path
        self.bytes = 0
        # how rows from this number on are read: files may have other columns
        self.readings: list[tuple[int, Reading]] = []
        self._config = config
        self._near = NearDuplicates(config.near, self.sample) if config.near else None
        self._exact: dict[bytes, int] = {}
        self._offsets = array.array("Q")

    def __enter__(self) -> Kept:
        self._file = open(self.path, "a+b")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._offsets)

    def sample(self, number: int) -> Sample:
        """What a kept row says, read again from the file."""
        start, end = self._offsets[number], self.bytes
        if number + 1 < len(self):
            end = self._offsets[number + 1]
        line = os.pread(self._file.fileno(), end - start, start)
        return self._read(line, number).sample

    def copy_of(self, sample: Sample) -> str:
        """Where the kept row stands that this one is but for white space; empty: nowhere."""
        number = self._exact.get(sample.key)
        return "" if number is None else self._place(number)

    def add(self, rows: Sequence[Row], anew: bool = True) -> Iterator[tuple[Row, str, str]]:
        """Keeps what is no duplicate; (row, filter, reason) of the others. Without `anew` they are
        in the file, and all of them kept.
        """
        batch = Batch(self._near, [row.sample for row in rows]) if self._near else None
        for place, row in enumerate(rows):
            if anew:
                if reason := self.copy_of(row.sample):
                    yield row, "duplicate", reason
                    continue
                near = batch.near(place) if batch else None
                if near is not None:
                    yield row, "near_duplicate", self._place(near)
                    continue
                self._file.write(row.line)
            if batch:
                batch.keep(place)
            if self._config.exact:
                self._exact[row.sample.key] = len(self)
            if not self.readings or row.reading != self.readings[-1][1]:
                self.readings.append((len(self), row.reading))
            self._offsets.append(self.bytes)
            self.bytes += len(row.line)
        if batch:
            batch.close()
        self._file.flush()

    def restore(self, size: int, count: int, readings: Sequence[tuple[int, Reading]]) -> None:
        """Goes on after `count` rows in the first `size` bytes of the file; later ones are cut off.
        Raises DataError where they are not there.
        """
        self.readings = list(readings)
        there = os.fstat(self._file.fileno()).st_size
        if there >= size:
            self._file.truncate(size)
            self._file.seek(0)
            while lines := list(islice(self._file, AT_ONCE)):
                first = len(self)
                rows = [self._read(line, first + i) for i, line in enumerate(lines)]
                for _ in self.add(rows, anew=False):
                    pass
        if len(self) != count or self.bytes != size:
            raise DataError(
                f"{self.path} has {len(self)} rows, and {count} were written: it was changed or"
                " cut; delete its folder, or give another --out"
            )

    def save(self) -> None:
        """Brings what was written onto the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def _place(self, number: int) -> str:
        return f"as {self.path.name.removesuffix('.part')}, line {number + 1}"

    def _read(self, line: bytes, number: int) -> Row:
        where = f"{self.path}, line {number + 1}"
        at = bisect.bisect_right(self.readings, number, key=lambda one: one[0]) - 1
        row = json_object(line, where)
        return row_of(self.readings[at][1], where, row, line, self._config)
