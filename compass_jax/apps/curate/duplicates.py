"""Near-duplicate detection: MinHash with banding proposes candidates, the texts decide.

1. The signature of a row has SIGNATURE numbers (rensa's R-MinHash). On average two rows agree in a
   share J of them, where J is the Jaccard similarity of their shingles (arXiv 1704.04370).
2. A band is r consecutive numbers of a signature. Rows with an equal band fall into one bucket, and
   rows that share a bucket are candidates. Two rows share one with probability
   1 - (1 - J^r)^(SIGNATURE // r). r is the largest for which this is at least LEAST_RECALL at the
   threshold.
3. A bucket of more than CROWD rows comes from a template and is not searched. Most bands of a
   near-duplicate fall into other buckets.
4. The shingles of a candidate with a similar signature are read back. It is a near-duplicate if
   their Jaccard similarity is at least the threshold and the questions contain the same numbers.
   Texts of one template with other numbers are different questions, however long the template is.

A row is compared only with kept rows. The decisions depend on these rows and their order and not on
the batch size, so an index rebuilt from the kept rows decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from compass_jax.apps.curate.sample import Sample
from compass_jax.apps.curate.words import Numbers, combined

SIGNATURE = 128
LEAST_RECALL = 0.98
CROWD = 64  # rows
SLACK = 0.12  # allowed error of the estimate of J: three standard deviations of 128 draws
MOST_READ = 8  # candidates whose shingles are read back
SEED = 0
_MERGED = 4  # minimum size ratio of a level of the buckets to the next


def rows_per_band(threshold: float) -> int:
    """Returns the largest r with 1 - (1 - threshold^r)^(SIGNATURE // r) >= LEAST_RECALL, or 1 if no
    r qualifies.
    """
    candidates = [
        r
        for r in range(1, SIGNATURE + 1)
        if 1 - (1 - threshold**r) ** (SIGNATURE // r) >= LEAST_RECALL
    ]
    return max(candidates, default=1)


def jaccard(first: Numbers, second: Numbers) -> float:
    """Returns |A and B| / |A or B| of two sorted arrays of distinct values; 0 if both are empty."""
    intersection = len(np.intersect1d(first, second, assume_unique=True))
    union = len(first) + len(second) - intersection
    return intersection / union if union else 0.0


def signatures(shingles: Sequence[Numbers]) -> NDArray[np.uint32]:
    """Returns the MinHash signature of each row's shingles, uint32 [rows, SIGNATURE]."""
    from rensa import RMinHash

    ends = np.cumsum([0, *map(len, shingles)]).astype(np.uint64)
    flat = np.concatenate([*shingles, np.zeros(0, np.uint64)])
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(flat, ends, SIGNATURE, SEED)
    return np.array(matrix.to_rows(), np.uint32).reshape(len(shingles), SIGNATURE)


class Buckets:
    """The rows of each bucket, as sorted arrays of geometrically decreasing size."""

    def __init__(self) -> None:
        self._levels: list[tuple[Numbers, NDArray[np.uint32]]] = []

    def add(self, keys: Numbers, rows: NDArray[np.uint32]) -> None:
        """Adds row n to the bucket of key n."""
        order = np.argsort(keys, kind="stable")
        keys, rows = keys[order], rows[order]
        while self._levels and len(self._levels[-1][0]) < _MERGED * len(keys):
            more_keys, more_rows = self._levels.pop()
            keys, rows = np.concatenate([more_keys, keys]), np.concatenate([more_rows, rows])
            order = np.argsort(keys, kind="stable")
            keys, rows = keys[order], rows[order]
        self._levels.append((keys, rows))

    def find(self, keys: Numbers, most: int) -> tuple[NDArray, NDArray, NDArray]:
        """Looks up the rows in the buckets of the keys.

        Returns the number of rows in the bucket of each key and, for each row in a bucket with at
        most `most` rows, its index into `keys` (sorted) and the row.
        """
        bounds = [
            (np.searchsorted(level, keys), np.searchsorted(level, keys, "right"))
            for level, _ in self._levels
        ]
        counts = sum((high - low for low, high in bounds), np.zeros(len(keys), np.int64))
        key_indices, row_parts = [np.zeros(0, np.int64)], [np.zeros(0, np.uint32)]
        for (low, high), (_, rows) in zip(bounds, self._levels, strict=True):
            hits = np.flatnonzero((high > low) & (counts <= most))
            sizes = (high - low)[hits]
            starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
            positions = np.repeat(low[hits], sizes) + np.arange(sizes.sum()) - starts
            key_indices.append(np.repeat(hits, sizes))
            row_parts.append(rows[positions])
        key_index = np.concatenate(key_indices)
        order = np.argsort(key_index, kind="stable")
        return counts, key_index[order], np.concatenate(row_parts)[order]


class NearDuplicates:
    """The index of kept rows that new rows are compared with.

    Args:
        threshold: the Jaccard similarity from which a row is a near-duplicate.
        read: returns the shingles of a kept row by its number. It is not called for rows of the
            current batch.
    """

    def __init__(self, threshold: float, read: Callable[[int], Numbers]):
        self.threshold = threshold
        self.read = read
        self.count = 0
        self.buckets = Buckets()
        self._signatures = np.zeros((1024, SIGNATURE), np.uint16)
        self._numbers = np.zeros(1024, np.uint64)
        self._in_band = rows_per_band(threshold)

    def bands(self, signed: NDArray[np.uint32]) -> Numbers:
        """Returns the bucket key of each band, uint64 [rows, bands]."""
        columns, r = signed.T.astype(np.uint64), self._in_band
        starts = range(0, SIGNATURE - r + 1, r)
        band = np.zeros(len(signed), np.uint64)
        return np.stack([combined([band + np.uint64(i), *columns[i : i + r]]) for i in starts], 1)

    def close_to(self, signed: NDArray[np.uint32], numbers: int, rows: NDArray) -> NDArray:
        """Returns candidate rows of similar signature and equal numbers, most similar first."""
        agree = (self._signatures[rows] == signed.astype(np.uint16)).mean(1)
        is_similar = (agree >= self.threshold - SLACK) & (self._numbers[rows] == np.uint64(numbers))
        similar = rows[is_similar]
        return similar[np.lexsort((similar, -agree[is_similar]))][:MOST_READ]

    def keep(self, signed: NDArray[np.uint32], numbers: int) -> int:
        """Stores a new row's signature (2 bytes per number) and returns the row's number."""
        if self.count == len(self._numbers):
            self._signatures = _doubled(self._signatures)
            self._numbers = _doubled(self._numbers)
        self._signatures[self.count] = signed.astype(np.uint16)
        self._numbers[self.count] = numbers
        self.count += 1
        return self.count - 1


class Batch:
    """A batch of rows that are decided in order. `close` adds the kept ones to the index's
    buckets.
    """

    def __init__(self, index: NearDuplicates, samples: Sequence[Sample]):
        self._index = index
        self._samples = samples
        self._signed = signatures([sample.shingles for sample in samples])
        self._keys = index.bands(self._signed)
        counts, key_indices, rows = index.buckets.find(self._keys.ravel(), CROWD)
        self._bands = self._keys.shape[1]
        self._counts = counts.reshape(self._keys.shape)
        self._key_indices = key_indices
        self._rows = rows
        self._ends = np.searchsorted(key_indices, np.arange(len(samples) + 1) * self._bands)
        self._fresh: dict[int, list[int]] = {}  # bucket -> kept rows of this batch
        self._kept: dict[int, int] = {}  # row -> its index in this batch

    def near_duplicate(self, place: int) -> int | None:
        """Returns the number of a kept row that sample `place` nearly duplicates, or None."""
        sample = self._samples[place]
        candidates = self._candidates(place)
        if not len(candidates) or not len(sample.shingles):
            return None
        for row in self._index.close_to(self._signed[place], sample.numbers, candidates).tolist():
            at = self._kept.get(row)
            shingles = self._index.read(row) if at is None else self._samples[at].shingles
            if jaccard(shingles, sample.shingles) >= self._index.threshold:
                return row
        return None

    def keep(self, place: int) -> int:
        """Keeps sample `place` and returns its row number."""
        row = self._index.keep(self._signed[place], self._samples[place].numbers)
        self._kept[row] = place
        if len(self._samples[place].shingles):
            for key in self._keys[place].tolist():
                self._fresh.setdefault(key, []).append(row)
        return row

    def close(self) -> None:
        """Makes the kept rows visible to later batches."""
        row_places = [
            (row, place) for row, place in self._kept.items() if len(self._samples[place].shingles)
        ]
        if row_places:
            rows, places = np.array(row_places, np.uint32).T
            keys = self._keys[places].ravel()
            self._index.buckets.add(keys, np.repeat(rows, self._bands))

    def _candidates(self, place: int) -> NDArray:
        """Returns the distinct kept rows in the sample's buckets of at most CROWD rows."""
        batch_rows = [self._fresh.get(key, ()) for key in self._keys[place].tolist()]
        part = slice(self._ends[place], self._ends[place + 1])
        index_rows = self._rows[part]
        if any(batch_rows):
            sizes = self._counts[place] + np.array([len(rows) for rows in batch_rows])
            is_searched = sizes <= CROWD
            index_rows = index_rows[is_searched[self._key_indices[part] - place * self._bands]]
            new_rows = [
                row
                for rows, ok in zip(batch_rows, is_searched.tolist(), strict=True)
                if ok
                for row in rows
            ]
            index_rows = np.concatenate([index_rows, np.array(new_rows, np.uint32)])
        return np.unique(index_rows)


def _doubled(array: NDArray) -> NDArray:
    return np.concatenate([array, np.zeros_like(array)])
