"""Conversations that share rows: each is complete in one row, the rows are few, and packing is
repeatable.
"""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from compass_jax.data.packing import packed, padded
from compass_jax.data.sft import SFTExample

LONGEST = 24
SIZES = st.lists(st.integers(1, LONGEST), min_size=1, max_size=40)


def conversations(sizes):
    """Returns a conversation of each size; its first token occurs in no other."""
    rng = np.random.default_rng(0)
    return [
        SFTExample(
            np.array([500 + i, *rng.integers(1, 500, n - 1)], np.int32), rng.random(n) < 0.5, ""
        )
        for i, n in enumerate(sizes)
    ]


def unpack(rows):
    """Counts the (tokens, mask) of the conversations in the rows, read token by token."""
    parts = []
    for row in range(len(rows.tokens)):
        before = 0
        for place in range(rows.lengths[row]):
            number = rows.segments[row, place]
            if number != before:
                assert number == before + 1  # 1, 2, ... from left to right
                parts.append(([], []))
            parts[-1][0].append(int(rows.tokens[row, place]))
            parts[-1][1].append(bool(rows.learnt[row, place]))
            before = number
        for array in (rows.tokens, rows.learnt, rows.segments):
            assert not array[row, rows.lengths[row] :].any()
    return Counter((tuple(tokens), tuple(mask)) for tokens, mask in parts)


def count_of_each(examples):
    return Counter((tuple(x.tokens.tolist()), tuple(x.mask.tolist())) for x in examples)


@given(SIZES)
def test_every_conversation_is_in_the_rows_once_and_whole_and_no_two_rows_could_be_one(sizes):
    examples = conversations(sizes)
    rows = packed(examples, LONGEST)
    assert unpack(rows) == count_of_each(examples)
    filled = sorted(rows.lengths.tolist())
    assert len(filled) == 1 or filled[0] + filled[1] > LONGEST
    repeat = packed(conversations(sizes), LONGEST)
    assert all(np.array_equal(a, b) for a, b in zip(rows, repeat, strict=True))
    types = [array.dtype for array in rows]
    assert types == [np.int32, np.int32, np.float32, np.int32]


def test_rows_of_one_conversation_each_hold_the_same_tokens():
    examples = conversations([3, 24, 1, 7])
    rows = padded(examples, LONGEST)
    assert rows.segments is None and rows.lengths.tolist() == [3, 24, 1, 7]
    one_each = rows._replace(segments=(np.arange(LONGEST) < rows.lengths[:, None]).astype(np.int32))
    assert unpack(one_each) == unpack(packed(examples, LONGEST)) == count_of_each(examples)


def test_lengths_that_fill_rows_leave_no_padding():
    assert packed(conversations([12, 6, 24, 6, 23, 1]), LONGEST).lengths.tolist() == [24] * 3
