"""The kept rows, as later rows are compared with them."""

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
    """A row with its conversation, the line that is written, and its reference answer."""

    sample: Sample
    line: bytes
    columns: dict
    reference: object  # None: there is none


class Kept:
    """The index of the rows that stay; a context manager. Their shingles are in a temporary file,
    from which a candidate's are read again.
    """

    def __init__(self, config: PrepareConfig, name: str):
        self._config, self._name = config, name
        self._near = NearDuplicates(config.near, self.shingles) if config.near else None
        self._exact: dict[bytes, int] = {}
        self._ends = array.array("Q", [0])  # bytes of the shingles up to each row

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
        """Returns the place of the kept row that equals a sample but for white space, or ""."""
        number = self._exact.get(sample.key)
        return "" if number is None else self._place(number)

    def add(self, rows: Sequence[Row]) -> Iterator[tuple[Row, str, str]]:
        """Keeps the rows that are no duplicates; yields (row, filter, reason) of each row, with an
        empty filter for a kept one.
        """
        batch = Batch(self._near, [row.sample for row in rows]) if self._near else None
        for place, row in enumerate(rows):
            if reason := self.copy_of(row.sample):
                yield row, "duplicate", reason
                continue
            near = batch.near(place) if batch else None
            if near is not None:
                yield row, "near_duplicate", self._place(near)
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
