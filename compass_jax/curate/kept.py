"""The index of kept rows, which later rows are compared with."""

from __future__ import annotations

import array
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from compass_jax.config.prepare import PrepareConfig
from compass_jax.curate.duplicates import Batch, NearDuplicates
from compass_jax.curate.sample import Sample
from compass_jax.curate.words import Numbers


class Row(NamedTuple):
    """A row with its conversation, its output line, and its reference answer."""

    sample: Sample
    line: bytes
    columns: dict
    reference: object  # None if the row has no reference


class Kept:
    """A context manager that indexes the rows that stay. Their shingles are stored in a temporary
    file and read back for each candidate.
    """

    def __init__(self, config: PrepareConfig, name: str):
        self._config, self._name = config, name
        self._near = NearDuplicates(config.near, self.shingles) if config.near else None
        self._exact: dict[bytes, int] = {}
        self._ends = array.array("Q", [0])  # byte offset after each row's shingles

    def __enter__(self) -> Kept:
        self._file = tempfile.TemporaryFile()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def shingles(self, number: int) -> Numbers:
        """Returns the shingles of a kept row."""
        start, end = self._ends[number : number + 2]
        return np.frombuffer(os.pread(self._file.fileno(), end - start, start), np.uint64)

    def copy_of(self, sample: Sample) -> str:
        """Returns the place of a kept row that equals the sample up to white space, or ""."""
        number = self._exact.get(sample.key)
        return "" if number is None else self._place(number)

    def add(self, rows: Sequence[Row]) -> Iterator[tuple[Row, str, str]]:
        """Keeps the rows that are not duplicates. Yields (row, filter, reason) for each row; the
        filter of a kept row is empty.
        """
        batch = Batch(self._near, [row.sample for row in rows]) if self._near else None
        for place, row in enumerate(rows):
            if reason := self.copy_of(row.sample):
                yield row, "duplicate", reason
                continue
            duplicate = batch.near(place) if batch else None
            if duplicate is not None:
                yield row, "near_duplicate", self._place(duplicate)
                continue
            yield row, "", ""
            if self._config.exact:
                self._exact[row.sample.key] = len(self)
            shingles = b""
            if batch:
                batch.keep(place)
                shingles = row.sample.shingles.tobytes()
            os.pwrite(self._file.fileno(), shingles, self._ends[-1])
            self._ends.append(self._ends[-1] + len(shingles))
        if batch:
            batch.close()

    def _place(self, number: int) -> str:
        return f"as {self._name}, line {number + 1}"
