"""Near-duplicates: MinHash with banding finds candidates, the texts themselves decide.

1. A row's signature has SIGNATURE numbers (rensa's R-MinHash); two rows agree in the share J of
   them, their shingles' Jaccard similarity, on average (arXiv 1704.04370 for this form of it).
2. A band is some numbers in a row. Rows with an equal band lie in one bucket, and rows that share a
   bucket are candidates. With bands of r numbers two rows share one with probability
   1 - (1 - J^r)^(SIGNATURE // r); r is the largest for which that is LEAST_RECALL at the threshold.
3. A bucket of more than CROWD rows holds the words of a template, and is not searched: of a text
   that is nearly the same, most bands are in other buckets.
4. A candidate whose signature agrees is read again, and counts where the Jaccard similarity of the
   shingles is at least the threshold and the questions have the same numbers. Texts of one template
   with other numbers are other questions, however long the template is.

A row is compared with kept rows alone. What is decided depends on these and their order, and not on
batches: an index that is built anew from the kept rows decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from compass_jax.curate.sample import Sample
from compass_jax.curate.words import Numbers, combined

SIGNATURE = 128
LEAST_RECALL = 0.98
CROWD = 64  # rows
SLACK = 0.12  # of the estimate: three standard deviations of 128 draws
MOST_READ = 8  # candidates that are read again
SEED = 0
_MERGED = 4  # a level of the buckets is at least so many times the next one


def rows_per_band(threshold: float) -> int:
    """The largest r with 1 - (1 - threshold^r)^(SIGNATURE // r) >= LEAST_RECALL; 1 where there is
    none.
    """
    good = [
        r
        for r in range(1, SIGNATURE + 1)
        if 1 - (1 - threshold**r) ** (SIGNATURE // r) >= LEAST_RECALL
    ]
    return max(good, default=1)


def jaccard(first: Numbers, second: Numbers) -> float:
    """|A and B| / |A or B| of two sorted arrays without repeats; 0 of two empty ones."""
    both = len(np.intersect1d(first, second, assume_unique=True))
    either = len(first) + len(second) - both
    return both / either if either else 0.0


def signatures(shingles: Sequence[Numbers]) -> NDArray[np.uint32]:
    """uint32 [rows, SIGNATURE]: the MinHash signature of each row's shingles."""
    from rensa import RMinHash

    ends = np.cumsum([0, *map(len, shingles)]).astype(np.uint64)
    flat = np.concatenate([*shingles, np.zeros(0, np.uint64)])
    made = RMinHash.digest_matrix_from_flat_token_hashes(flat, ends, SIGNATURE, SEED)
    return np.array(made.to_rows(), np.uint32).reshape(len(shingles), SIGNATURE)


class Buckets:
    """Which rows lie in a bucket: sorted arrays, each much longer than the next, 12 bytes a row and
    band.
    """

    def __init__(self) -> None:
        self._levels: list[tuple[Numbers, NDArray[np.uint32]]] = []

    def add(self, keys: Numbers, rows: NDArray[np.uint32]) -> None:
        """Puts row n into the bucket of key n."""
        order = np.argsort(keys, kind="stable")
        keys, rows = keys[order], rows[order]
        while self._levels and len(self._levels[-1][0]) < _MERGED * len(keys):
            more_keys, more_rows = self._levels.pop()
            keys, rows = np.concatenate([more_keys, keys]), np.concatenate([more_rows, rows])
            order = np.argsort(keys, kind="stable")
            keys, rows = keys[order], rows[order]
        self._levels.append((keys, rows))

    def find(self, keys: Numbers, most: int) -> tuple[NDArray, NDArray, NDArray]:
        """(how many rows each key's bucket has; indices into `keys`, sorted, and a row for each
        row of a bucket that has at most `most`).
        """
        bounds = [
            (np.searchsorted(level, keys), np.searchsorted(level, keys, "right"))
            for level, _ in self._levels
        ]
        counts = sum((high - low for low, high in bounds), np.zeros(len(keys), np.int64))
        whose, found = [np.zeros(0, np.int64)], [np.zeros(0, np.uint32)]
        for (low, high), (_, rows) in zip(bounds, self._levels, strict=True):
            some = np.flatnonzero((high > low) & (counts <= most))
            sizes = (high - low)[some]
            ahead = np.repeat(np.cumsum(sizes) - sizes, sizes)
            at = np.repeat(low[some], sizes) + np.arange(sizes.sum()) - ahead
            whose.append(np.repeat(some, sizes))
            found.append(rows[at])
        keyed = np.concatenate(whose)
        order = np.argsort(keyed, kind="stable")
        return counts, keyed[order], np.concatenate(found)[order]


class NearDuplicates:
    """The kept rows, by number, as later ones are compared with them.

    read: returns the shingles of a kept row by its number; it is not called for rows of the
        present batch.
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
        """uint64 [rows, bands]: the bucket of each band."""
        columns, r = signed.T.astype(np.uint64), self._in_band
        starts = range(0, SIGNATURE - r + 1, r)
        band = np.zeros(len(signed), np.uint64)
        return np.stack([combined([band + np.uint64(i), *columns[i : i + r]]) for i in starts], 1)

    def close_to(self, signed: NDArray[np.uint32], numbers: int, rows: NDArray) -> NDArray:
        """Of candidate rows those that may be near by their signatures, the likeliest first."""
        agree = (self._signatures[rows] == signed.astype(np.uint16)).mean(1)
        good = (agree >= self.threshold - SLACK) & (self._numbers[rows] == np.uint64(numbers))
        chosen = rows[good]
        return chosen[np.lexsort((chosen, -agree[good]))][:MOST_READ]

    def keep(self, signed: NDArray[np.uint32], numbers: int) -> int:
        """The number of a new row, whose signature is remembered: 2 bytes of each number of it."""
        if self.count == len(self._numbers):
            self._signatures = _doubled(self._signatures)
            self._numbers = _doubled(self._numbers)
        self._signatures[self.count] = signed.astype(np.uint16)
        self._numbers[self.count] = numbers
        self.count += 1
        return self.count - 1


class Batch:
    """Rows that are decided one after the other; `close` puts the kept ones into the buckets."""

    def __init__(self, index: NearDuplicates, samples: Sequence[Sample]):
        self._index = index
        self._samples = samples
        self._signed = signatures([sample.shingles for sample in samples])
        self._keys = index.bands(self._signed)
        count, found, rows = index.buckets.find(self._keys.ravel(), CROWD)
        self._bands = self._keys.shape[1]
        self._counts = count.reshape(self._keys.shape)
        self._found = found
        self._rows = rows
        self._ends = np.searchsorted(found, np.arange(len(samples) + 1) * self._bands)
        self._fresh: dict[int, list[int]] = {}  # bucket -> kept rows of this batch
        self._kept: dict[int, int] = {}  # row -> its place in this batch

    def near(self, place: int) -> int | None:
        """The number of a kept row that sample `place` nearly is; None where there is none."""
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
        """Keeps sample `place`; its number."""
        row = self._index.keep(self._signed[place], self._samples[place].numbers)
        self._kept[row] = place
        if len(self._samples[place].shingles):
            for key in self._keys[place].tolist():
                self._fresh.setdefault(key, []).append(row)
        return row

    def close(self) -> None:
        """Makes the kept rows known to later batches."""
        some = [(row, at) for row, at in self._kept.items() if len(self._samples[at].shingles)]
        if some:
            rows, places = np.array(some, np.uint32).T
            keys = self._keys[places].ravel()
            self._index.buckets.add(keys, np.repeat(rows, self._bands))

    def _candidates(self, place: int) -> NDArray:
        """The distinct kept rows in its buckets that are no crowd, those of this batch included."""
        fresh = [self._fresh.get(key, ()) for key in self._keys[place].tolist()]
        part = slice(self._ends[place], self._ends[place + 1])
        older = self._rows[part]
        if any(fresh):
            sizes = self._counts[place] + np.array([len(rows) for rows in fresh])
            calm = sizes <= CROWD
            older = older[calm[self._found[part] - place * self._bands]]
            new = [row for rows, ok in zip(fresh, calm.tolist(), strict=True) if ok for row in rows]
            older = np.concatenate([older, np.array(new, np.uint32)])
        return np.unique(older)


def _doubled(array: NDArray) -> NDArray:
    return np.concatenate([array, np.zeros_like(array)])
