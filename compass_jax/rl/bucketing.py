"""Groups rows of many lengths into micro-batches of few shapes. A plan depends on lengths alone,
so that every process makes the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped


class Packing(NamedTuple):
    """Where the sequences of a micro-batch are when several share a row."""

    length: int  # tokens per row
    n_rows: int
    row: Int[np.ndarray, "n"]  # row of each sequence
    start: Int[np.ndarray, "n"]  # its first token in that row
    size: Int[np.ndarray, "n"]  # its tokens; 0 for padding

    def sources(self) -> tuple[Int[np.ndarray, "p m"], Int[np.ndarray, "p m"]]:
        """Returns (sequence, position in it) of each token of the rows; -1 and 0 for padding."""
        sequence = np.full((self.n_rows, self.length), -1, np.int32)
        position = np.zeros_like(sequence)
        for i, (row, start, size) in enumerate(zip(self.row, self.start, self.size, strict=True)):
            sequence[row, start : start + size] = i
            position[row, start : start + size] = np.arange(size)
        return sequence, position


class MicroBatch(NamedTuple):
    """Rows that are padded to one length and computed together."""

    length: int  # the bucket: tokens per row
    rows: Int[np.ndarray, "n"]  # indices into the lengths that were planned; -1 is a padding row
    packing: Packing | None = None  # None: one sequence a row

    @property
    def tokens(self) -> int:
        """Tokens that the model computes, padding included."""
        if self.packing is not None:
            return self.packing.n_rows * self.packing.length
        return self.length * len(self.rows)


def plan(
    lengths: Sequence[int] | np.ndarray,
    buckets: Sequence[int],
    micro_batch_tokens: int,
    *,
    rows_multiple: int = 1,
    packed_row_tokens: int = 0,
) -> list[MicroBatch]:
    """Returns micro-batches that hold every row exactly once, in a bucket at least as long as the
    row, with the fewest padded tokens.

    A micro-batch of bucket `length` has full = max(1, micro_batch_tokens // length) rows, or half
    or a quarter of that, rounded to a multiple of `rows_multiple` (the number of devices that share
    the rows): three shapes per bucket at most, whatever the lengths. The rows that do not fill
    a micro-batch of their bucket move into the free space of a longer one when that lowers the
    number of padded tokens. The longest bucket comes first, so that a shape that does not fit in
    memory fails at once.

    With `packed_row_tokens` several sequences share a row of this length in tokens: first fit,
    longest first, at most packed_row_tokens // buckets[0] of them. A micro-batch then has as many
    rows as one of a bucket of this length: three shapes at most.

    Raises:
        ValueError: a row is longer than the last bucket, or has a negative length (names the
            first); or packed rows are shorter than the last bucket.
    """
    sizes = _checked(lengths, buckets, micro_batch_tokens, rows_multiple)
    if packed_row_tokens:
        counts = row_counts(packed_row_tokens, micro_batch_tokens, rows_multiple)
        return _pack(sizes, buckets, packed_row_tokens, counts)
    order = np.argsort(sizes, kind="stable")
    bucket = np.searchsorted(np.asarray(buckets), sizes[order])
    queue = [order[bucket == k] for k in range(len(buckets))]
    shapes = [row_counts(length, micro_batch_tokens, rows_multiple) for length in buckets]
    moved = _rides(tuple(len(q) for q in queue), tuple(buckets), tuple(shapes))
    batches: list[MicroBatch] = []
    riders = order[:0]
    # `riders` are the rows that the next shorter bucket hands to this one.
    for k, length in enumerate(buckets):
        waiting = np.concatenate([riders, queue[k]])
        stay = len(waiting) - moved[k]
        riders = waiting[stay:]  # the longest
        batches = _cut(waiting[:stay], length, shapes[k]) + batches
    return batches


def _checked(
    lengths: Sequence[int] | np.ndarray,
    buckets: Sequence[int],
    micro_batch_tokens: int,
    rows_multiple: int,
) -> Int[np.ndarray, "n"]:
    """Returns the lengths as an array. Raises the errors of `plan`."""
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.ndim != 1:
        raise ValueError(
            f"plan: lengths has shape {list(sizes.shape)}, expected one length per row"
        )
    if (
        not buckets
        or list(buckets) != sorted(set(buckets))
        or micro_batch_tokens < 1
        or rows_multiple < 1
    ):
        raise ValueError(
            f"plan: buckets {buckets} must increase; micro_batch_tokens {micro_batch_tokens} and"
            f" rows_multiple {rows_multiple} be positive"
        )
    too_long = np.flatnonzero(sizes > buckets[-1])
    if too_long.size:
        i = int(too_long[0])
        raise ValueError(
            f"plan: row {i} has {sizes[i]} tokens, more than the last bucket holds ({buckets[-1]}):"
            " add a longer bucket (rl.buckets)"
        )
    negative = np.flatnonzero(sizes < 0)
    if negative.size:
        raise ValueError(f"plan: row {int(negative[0])} has {sizes[negative[0]]} tokens")
    return sizes


def padding_frac(batches: Sequence[MicroBatch], lengths: Sequence[int] | np.ndarray) -> float:
    """Returns the share of padding in planned tokens, padding rows included; 0 for no plan."""
    area = sum(batch.tokens for batch in batches)
    return 1.0 - float(np.sum(np.asarray(lengths, dtype=np.int64))) / area if area else 0.0


def take_rows(
    array: Shaped[np.ndarray, "n ..."],
    rows: Int[np.ndarray, "m"],
    length: int,
    fill: int | float | bool = 0,
):
    """Returns rows `rows` of an array, with axis 1 (t, if the array has it) cut or padded to
    `length`. Padding holds `fill`.
    """
    if array.ndim == 1:
        return take_rows(array[:, None], rows, 1, fill)[:, 0]
    out = np.full((len(rows), length, *array.shape[2:]), fill, array.dtype)
    for place, row in enumerate(rows):
        if row >= 0:
            tokens = array[row, :length]
            out[place, : len(tokens)] = tokens
    return out


def row_counts(length: int, micro_batch_tokens: int, multiple: int) -> tuple[int, ...]:
    """Returns the numbers of rows that a micro-batch of a bucket may have, largest first: full,
    half and quarter, as multiples of `multiple`.
    """
    full = max(1, micro_batch_tokens // length // multiple)
    return tuple(sorted({max(1, full // part) * multiple for part in (1, 2, 4)}, reverse=True))


def _pack(
    sizes: Int[np.ndarray, "n"], buckets: Sequence[int], row_tokens: int, counts: Sequence[int]
) -> list[MicroBatch]:
    """Returns the micro-batches of sequences that share rows of `row_tokens` tokens."""
    if row_tokens < buckets[-1]:
        raise ValueError(f"plan: rows of {row_tokens} tokens are shorter than {buckets[-1]}")
    most = row_tokens // buckets[0]
    free, contents = np.zeros(0, np.int64), list[list[int]]()
    for i in np.argsort(-sizes, kind="stable"):
        fits = np.flatnonzero(free >= sizes[i])
        if not fits.size:
            free, fits = np.append(free, row_tokens), np.array([len(contents)])
            contents.append([])
        row = int(fits[0])
        contents[row].append(int(i))
        # With -1 a row that has its largest number of sequences is closed even to empty ones.
        free[row] = free[row] - sizes[i] if len(contents[row]) < most else -1
    batches, first = [], 0
    for count in _cover(len(contents), counts):
        rows = contents[first : first + count]
        batches.append(_packed(rows, sizes, buckets[-1], row_tokens, count, most))
        first += count
    return batches


def _packed(
    contents: Sequence[Sequence[int]],
    sizes: Int[np.ndarray, "n"],
    length: int,
    row_tokens: int,
    count: int,
    most: int,
) -> MicroBatch:
    """Returns the micro-batch of the sequences that each row holds, with count * most of them."""
    size = np.zeros((count, most), np.int32)
    indices = np.full((count, most), -1, np.int64)
    for i, sequences in enumerate(contents):
        indices[i, : len(sequences)] = sequences
        size[i, : len(sequences)] = sizes[sequences]
    # An exclusive cumulative sum: each sequence starts where the one before it ends.
    start = np.cumsum(size, axis=1, dtype=np.int32) - size
    row = np.repeat(np.arange(count, dtype=np.int32), most)
    packing = Packing(row_tokens, count, row, start.ravel(), size.ravel())
    return MicroBatch(length, indices.ravel(), packing)


def _cover(n: int, counts: Sequence[int]) -> list[int]:
    """Returns micro-batch sizes that hold `n` rows: full ones, then half and quarter at most once
    each if that saves rows. Only the last has free rows.
    """
    sizes = [counts[0]] * (n // counts[0])
    rest = n - sum(sizes)
    for i, count in enumerate(counts):
        if rest > sum(counts[i + 1 :]):  # the smaller ones together could not hold the rest
            sizes.append(count)
            rest -= count
    return sizes


def _cut(rows: Int[np.ndarray, "n"], length: int, counts: Sequence[int]) -> list[MicroBatch]:
    """Returns the rows of one bucket, shortest first, as micro-batches; padding rows fill the last
    one.
    """
    sizes = _cover(len(rows), counts)
    padded = np.concatenate([rows, np.full(sum(sizes) - len(rows), -1, rows.dtype)])
    return (
        [MicroBatch(length, part) for part in np.split(padded, np.cumsum(sizes)[:-1])]
        if sizes
        else []
    )


def _rides(
    rows: Sequence[int], buckets: Sequence[int], counts: Sequence[Sequence[int]]
) -> list[int]:
    """Returns how many rows each bucket hands to the next one: fewest tokens in all, then fewest
    micro-batches, then fewest rows moved.

    Dynamic programming over (bucket, rows handed to it). It tries only numbers of rows that save a
    micro-batch or make one smaller.
    """

    @cache
    def best(k: int, arriving: int) -> tuple[tuple[int, int, int], tuple[int, ...]]:
        n = rows[k] + arriving
        options = {0}
        if k + 1 < len(buckets):
            # Moving n % count rows leaves full micro-batches of `count` rows; moving n leaves none.
            options |= {n % count for count in counts[k]} | ({n} if n <= counts[k][0] else set())
        plans = []
        for moved in options:
            sizes = _cover(n - moved, counts[k])
            (tokens, batches, total), rest = (
                best(k + 1, moved) if k + 1 < len(buckets) else ((0, 0, 0), ())
            )
            plans.append(
                (
                    (tokens + sum(sizes) * buckets[k], batches + len(sizes), total + moved),
                    (moved, *rest),
                )
            )
        # Equal costs are decided by the moves, so the order of the set of options has no effect.
        return min(plans)

    return list(best(0, 0)[1])


def best_buckets(
    lengths: Sequence[int] | np.ndarray, count: int, longest: int, multiple: int = 8
) -> tuple[int, ...]:
    """Returns at most `count` buckets that hold rows of these lengths with the fewest padded
    tokens. The last bucket is `longest`, the others are multiples of `multiple`.

    Exact, by dynamic programming over the ends of buckets. An end that holds no more rows than the
    one before it is left out, so the time grows with the square of the number of different lengths.
    Rows that `plan` adds to fill a micro-batch are not counted.

    Raises:
        ValueError: a row is longer than `longest`.
    """
    sizes = np.asarray(lengths, np.int64)
    if count < 1 or multiple < 1 or (sizes.size and sizes.max() > longest):
        raise ValueError(
            f"best_buckets: count {count} and multiple {multiple} must be positive, rows at most"
            f" {longest} long"
        )
    ends = np.append(np.arange(multiple, longest, multiple), longest)
    below = np.searchsorted(np.sort(sizes), ends, side="right")  # rows that fit each end
    useful = np.diff(below, prepend=0) > 0
    useful[-1] = True
    ends, below = ends[useful], below[useful]
    # tokens with one bucket up to each end; the end before it, -1 if it has one bucket fewer
    cost, start = below * ends, [np.full(len(ends), -1)]
    for _ in range(1, count):
        before, chosen = cost, np.full(len(ends), -1)
        cost = before.copy()
        for j in range(1, len(ends)):
            options = before[:j] + (below[j] - below[:j]) * ends[j]
            i = int(np.argmin(options))
            # Only if it is smaller, so that no bucket is used that saves nothing.
            if options[i] < before[j]:
                cost[j], chosen[j] = options[i], i
        start.append(chosen)
    out: list[int] = []
    at = len(ends) - 1
    for previous in reversed(start):
        if not out or ends[at] != out[-1]:
            out.append(int(ends[at]))
        at = int(previous[at]) if previous[at] >= 0 else at
    return tuple(reversed(out))
