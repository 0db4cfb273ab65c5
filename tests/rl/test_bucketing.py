"""Bucketing plans, which place every row once, in few shapes, with less padding than if each row
stayed in its bucket.
"""

import inspect
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compass_jax.rl.bucketing import MicroBatch, best_buckets, padding_frac, plan, take_rows

BUCKETS = (16, 32, 64, 256)
cases = given(
    lengths=st.lists(st.integers(0, 256), max_size=70),
    tokens=st.sampled_from([100, 256, 500, 1024, 1800]),
    multiple=st.sampled_from([1, 2, 4]),
)
fast = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def allowed(bucket, tokens, multiple):
    full = max(1, tokens // bucket // multiple)
    return {max(1, full // part) * multiple for part in (1, 2, 4)}


@fast
@cases
def test_every_row_is_placed_once_in_an_allowed_shape(lengths, tokens, multiple):
    batches = plan(lengths, BUCKETS, tokens, rows_multiple=multiple)
    rows = np.concatenate([b.rows for b in batches]) if batches else np.zeros(0, int)
    assert sorted(rows[rows >= 0]) == list(range(len(lengths)))
    for b in batches:
        assert b.length in BUCKETS and len(b.rows) in allowed(b.length, tokens, multiple)
        real = b.rows[b.rows >= 0]
        assert len(real) and all(lengths[i] <= b.length for i in real)
    assert [b.length for b in batches] == sorted((b.length for b in batches), reverse=True)


@fast
@cases
def test_riding_along_never_costs_tokens(lengths, tokens, multiple):
    """A plan is no larger than one in which every row stays in its bucket, with the cheapest cover
    of each bucket by full micro-batches and at most one half and one quarter.
    """
    separate = 0
    for low, bucket in zip((-1, *BUCKETS), BUCKETS):
        n = sum(low < x <= bucket for x in lengths)
        full, *rest = sorted(allowed(bucket, tokens, multiple), reverse=True)
        options = [
            sum(c for c, used in zip(rest, bits) if used) for bits in np.ndindex(*[2] * len(rest))
        ] + [full]
        separate += bucket * (n // full * full + min(o for o in options if o >= n % full))
    batches = plan(lengths, BUCKETS, tokens, rows_multiple=multiple)
    area = sum(b.length * len(b.rows) for b in batches)
    assert area <= separate
    assert padding_frac(batches, lengths) == pytest.approx(1 - sum(lengths) / area if area else 0)


@fast
@cases
def test_sequences_share_rows_without_a_gap_or_an_overlap(lengths, tokens, multiple):
    """Rows have 512 tokens and at most 8 sequences each, in the shapes of that bucket."""
    batches = plan(lengths, (64, 256), tokens, rows_multiple=multiple, packed_row_tokens=512)
    rows = np.concatenate([b.rows for b in batches]) if batches else np.zeros(0, int)
    assert sorted(rows[rows >= 0]) == list(range(len(lengths)))
    row_tokens = []
    for b in batches:
        packing, sizes = b.packing, np.where(b.rows < 0, 0, np.array([*lengths, 0])[b.rows])
        assert packing.n_rows in allowed(512, tokens, multiple) and packing.length == 512
        assert b.length == 256 and len(b.rows) == 8 * packing.n_rows
        np.testing.assert_array_equal(packing.size, sizes)
        sequence, position = packing.sources()
        for row in range(packing.n_rows):
            members = np.flatnonzero((packing.row == row) & (packing.size > 0))
            ends = packing.start[members] + packing.size[members]
            np.testing.assert_array_equal(packing.start[members], [0, *ends[:-1]][: len(members)])
            row_tokens.append(int(sum(packing.size[members])))
            expected = np.concatenate([np.full(packing.size[i], i) for i in members] or [[]])
            np.testing.assert_array_equal(sequence[row][: row_tokens[-1]], expected)
            assert (sequence[row][row_tokens[-1] :] == -1).all() and row_tokens[-1] <= 512
            for i in members:
                np.testing.assert_array_equal(position[row][sequence[row] == i], range(sizes[i]))
    area = sum(b.packing.n_rows * 512 for b in batches)
    assert padding_frac(batches, lengths) == pytest.approx(1 - sum(lengths) / area if area else 0)


def test_packed_rows_hold_long_tails_with_little_padding():
    """Packing has less than half the padding of three buckets, and the number of sequences in a row
    is limited.
    """
    lengths = np.minimum(np.random.default_rng(1).lognormal(3.5, 0.7, 256).astype(int) + 1, 256)
    separate = plan(lengths, (64, 128, 256), 2048)
    shared = plan(lengths, (16, 256), 2048, packed_row_tokens=512)
    assert padding_frac(shared, lengths) < 0.5 * padding_frac(separate, lengths)
    (crowded,) = plan([3] * 8, (64, 256), 2048, packed_row_tokens=256)
    assert np.bincount(crowded.packing.row[crowded.packing.size > 0]).tolist() == [4, 4]


def as_lists(batches):
    return [(b.length, b.rows.tolist()) for b in batches]


def test_by_hand():
    assert as_lists(plan([10, 60, 12, 64, 9, 11], (16, 64), 256)) == [
        (64, [1, 3]),
        (16, [4, 0, 5, 2]),
    ]
    # one short row and three long ones: a separate micro-batch would cost 4 x 16 tokens, and the
    # free row costs none
    assert as_lists(plan([60, 5, 64, 62], (16, 64), 256)) == [(64, [1, 0, 3, 2])]
    # with four long rows there is no free row
    assert as_lists(plan([60, 5, 64, 62, 61], (16, 64), 256)) == [
        (64, [0, 4, 3, 2]),
        (16, [1, -1, -1, -1]),
    ]
    # three rows make a half and a quarter of a micro-batch of four
    assert as_lists(plan([60, 61, 62], (16, 64), 256)) == [(64, [0, 1]), (64, [2])]
    assert as_lists(plan([60, 61, 62], (64,), 32)) == [(64, [0]), (64, [1]), (64, [2])]
    assert plan([], (16,), 256) == []


def test_rides_go_through_an_empty_bucket():
    """The short row skips the middle bucket, which has no rows."""
    assert as_lists(plan([100, 120, 128, 3], (16, 32, 128), 512)) == [(128, [3, 0, 1, 2])]


def test_the_same_lengths_give_the_same_plan():
    lengths = np.random.default_rng(0).integers(1, 256, 200)
    assert as_lists(plan(lengths, BUCKETS, 2048)) == as_lists(
        plan(lengths.tolist(), list(BUCKETS), 2048)
    )


def test_long_tails_are_packed_well():
    """The padding rows of all buckets together are at most a quarter of one micro-batch."""
    lengths = np.minimum(np.random.default_rng(1).lognormal(3.5, 0.7, 256).astype(int) + 1, 256)
    buckets = np.array([32, 64, 128, 256])
    own_buckets = buckets[np.searchsorted(buckets, lengths)].sum()
    batches = plan(lengths, tuple(buckets.tolist()), 4096)
    assert sum(b.length * len(b.rows) for b in batches) <= own_buckets + 4096 // 4
    assert len({(b.length, len(b.rows)) for b in batches}) <= 8


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ([5, 300, 400], (64, 256), 512),
            r"row 1 has 300 tokens, more than the last bucket holds \(256\)",
        ),
        (([-1], (64,), 512), "row 0 has -1 tokens"),
        (([[1, 2]], (64,), 512), r"lengths has shape \[1, 2\]"),
        (([1], (64, 32), 512), r"buckets \(64, 32\) must increase"),
        (([1], (), 512), r"buckets \(\) must increase"),
        (([1], (64,), 0), "micro_batch_tokens 0"),
        (([1], (64,), 64, 1, 32), "rows of 32 tokens are shorter than 64"),
    ],
)
def test_bad_input_is_named(arguments, message, unchecked):
    with pytest.raises(ValueError, match=message):
        # without the runtime check of annotations, which is active in tests alone
        lengths, buckets, tokens, *rest = arguments
        names = ("rows_multiple", "packed_row_tokens")
        inspect.unwrap(plan)(lengths, buckets, tokens, **dict(zip(names, rest, strict=False)))


def test_take_rows():
    x = np.arange(1, 13, dtype=np.int32).reshape(3, 4)
    rows = np.array([2, -1, 0])
    for length, expected in (
        (2, [[9, 10], [0, 0], [1, 2]]),
        (5, [[9, 10, 11, 12, 0], [0] * 5, [1, 2, 3, 4, 0]]),
    ):
        got = take_rows(x, rows, length)
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(
        take_rows(np.array([True, True, True]), rows, 2), [True, False, True]
    )
    np.testing.assert_array_equal(
        take_rows(np.zeros((0, 4), np.float32), np.array([-1]), 2), np.zeros((1, 2))
    )


def test_take_rows_fills_routing_with_the_unset_sentinel():
    routing = np.ones((2, 3, 2, 2), np.uint8)
    got = take_rows(routing, np.array([1, -1]), 4, fill=255)
    assert got.dtype == np.uint8 and got.shape == (2, 4, 2, 2)
    assert np.all(got[0, :3] == 1) and np.all(got[0, 3] == 255) and np.all(got[1] == 255)


def test_a_micro_batch_is_a_length_and_rows():
    assert MicroBatch(4, np.array([0])).length == 4 and padding_frac(
        [MicroBatch(4, np.array([0, -1]))], [3]
    ) == pytest.approx(5 / 8)


def padded_tokens(lengths, buckets):
    return sum(buckets[np.searchsorted(buckets, x)] for x in lengths)


@fast
@given(
    lengths=st.lists(st.integers(0, 29), min_size=1, max_size=9),
    longest=st.integers(29, 33),
    count=st.integers(1, 4),
)
def test_the_best_buckets_are_the_best_of_all(lengths, longest, count):
    best = best_buckets(lengths, count, longest, 4)
    assert (
        len(best) <= count
        and best[-1] == longest
        and list(best) == sorted(set(best))
        and all(x % 4 == 0 for x in best[:-1])
    )
    ends = range(4, longest, 4)
    choices = (
        [*chosen, longest] for n in range(count) for chosen in itertools.combinations(ends, n)
    )
    assert padded_tokens(lengths, best) == min(
        padded_tokens(lengths, buckets) for buckets in choices
    )


def test_the_best_of_many_ends_are_found_in_a_moment():
    """Without pruned ends and arrays these lengths took minutes."""
    lengths = np.random.default_rng(0).integers(1, 65_536, 4000)
    before = time.process_time()
    best = best_buckets(lengths, 3, 65_536)
    assert time.process_time() - before < 5
    usual = [65_536 // 3, 65_536 * 2 // 3, 65_536]
    assert len(best) == 3 and padded_tokens(lengths, best) <= padded_tokens(lengths, usual)


def test_rows_longer_than_the_last_bucket_and_numbers_that_cannot_be_are_refused():
    for arguments in (([9], 2, 8), ([1], 0, 8), ([1], 1, 8, 0)):
        with pytest.raises(ValueError, match="best_buckets: count"):
            best_buckets(*arguments)


def test_a_long_tail_has_little_padding_in_the_best_of_twelve_buckets():
    """Plans of 4,096 tokens have at most 12% padding for 1,024 rows with prompts of 16 tokens and
    log-normal responses (median 64, sigma 1, cut at 512).
    """
    lengths = 16 + np.clip(
        np.exp(np.log(64) + np.random.default_rng(0).standard_normal(1024)), 1, 512
    ).astype(int)
    by_count = {
        n: padding_frac(plan(lengths, best_buckets(lengths, n, 528), 4096), lengths)
        for n in (4, 8, 12)
    }
    assert by_count[12] <= 0.12 < by_count[8] < 0.17 < by_count[4]
