"""Conversations that share rows: each once and whole, in few rows, the same again from a stream's
position alone.
"""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_streamed import run, stream_of, together, tokenizer, write  # noqa: F401

from compass_jax.data.packing import packed, padded
from compass_jax.data.sft import SFTExample
from compass_jax.data.streamed import ExampleStream

LONGEST = 24
SIZES = st.lists(st.integers(1, LONGEST), min_size=1, max_size=40)


def conversations(sizes):
    """One of each size; the first token is the conversation's own."""
    rng = np.random.default_rng(0)
    return [
        SFTExample(
            np.array([500 + i, *rng.integers(1, 500, n - 1)], np.int32), rng.random(n) < 0.5, ""
        )
        for i, n in enumerate(sizes)
    ]


def apart(rows):
    """(tokens, mask) of every conversation in the rows, read token by token."""
    found = []
    for row in range(len(rows.tokens)):
        before = 0
        for place in range(rows.lengths[row]):
            number = rows.segments[row, place]
            if number != before:
                assert number == before + 1  # 1, 2, ... from left to right
                found.append(([], []))
            found[-1][0].append(int(rows.tokens[row, place]))
            found[-1][1].append(bool(rows.learnt[row, place]))
            before = number
        for array in (rows.tokens, rows.learnt, rows.segments):
            assert not array[row, rows.lengths[row] :].any()
    return Counter((tuple(tokens), tuple(mask)) for tokens, mask in found)


def whole(examples):
    return Counter((tuple(x.tokens.tolist()), tuple(x.mask.tolist())) for x in examples)


@given(SIZES)
def test_every_conversation_is_in_the_rows_once_and_whole_and_no_two_rows_could_be_one(sizes):
    examples = conversations(sizes)
    rows = packed(examples, LONGEST)
    assert apart(rows) == whole(examples)
    filled = sorted(rows.lengths.tolist())
    assert len(filled) == 1 or filled[0] + filled[1] > LONGEST
    again = packed(conversations(sizes), LONGEST)
    assert all(np.array_equal(a, b) for a, b in zip(rows, again, strict=True))
    types = [array.dtype for array in rows]
    assert types == [np.int32, np.int32, np.float32, np.int32]


def test_rows_of_one_conversation_each_hold_the_same_tokens():
    examples = conversations([3, 24, 1, 7])
    rows = padded(examples, LONGEST)
    assert rows.segments is None and rows.lengths.tolist() == [3, 24, 1, 7]
    one_each = rows._replace(segments=(np.arange(LONGEST) < rows.lengths[:, None]).astype(np.int32))
    assert apart(one_each) == apart(packed(examples, LONGEST)) == whole(examples)


def test_lengths_that_fill_rows_leave_no_padding():
    assert packed(conversations([12, 6, 24, 6, 23, 1]), LONGEST).lengths.tolist() == [24] * 3


@given(SIZES, st.integers(1, 12), st.integers(0, 5))
def test_a_pass_loses_and_doubles_no_conversation_wherever_it_was_interrupted(sizes, batch, done):
    """At least two passes in updates of `batch`; the stream is restored after `done` of them."""
    examples = conversations(sizes)
    stream = ExampleStream(examples, seed=7)
    updates = max(done, -(-2 * len(sizes) // batch))
    expected = [packed(stream.next_batch(batch), LONGEST) for _ in range(updates)]
    first = ExampleStream(examples, seed=7)
    for _ in range(done):
        first.next_batch(batch)
    second = ExampleStream(examples, seed=7)
    second.restore(json.loads(json.dumps(first.state())))
    for update in expected[done:]:
        rows = packed(second.next_batch(batch), LONGEST)
        assert all(np.array_equal(a, b) for a, b in zip(update, rows, strict=True))
    found = sum((apart(rows) for rows in expected), Counter())
    passes, begun = divmod(updates * batch, len(sizes))
    assert found.keys() == whole(examples).keys()
    assert Counter(found.values()) == Counter(
        [passes] * (len(sizes) - begun) + [passes + 1] * begun
    )


@pytest.mark.parametrize("weights", [(), (("b", 3.0), ("a", 1.0))], ids=["a pass", "weights"])
def test_rows_read_by_record_are_packed_alike_on_any_number_of_processes(
    tmp_path,
    tokenizer,  # noqa: F811
    run,  # noqa: F811
    weights,
):
    files = write(tmp_path / "a.jsonl", "a", 30, "{broken\n"), write(tmp_path / "b.jsonl", "b", 9)
    config = run(*files, bad_rows="skip", packing=True, weights=weights)
    alone = stream_of(config, tokenizer)
    expected = [packed(alone.next_batch(8), 128) for _ in range(6)]

    def work(team):
        stream = stream_of(config, tokenizer, team)
        return [packed(stream.next_batch(8), 128) for _ in range(6)]

    for count in (1, 2):
        for found in together(count, work):
            for mine, theirs in zip(found, expected, strict=True):
                assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert all(len(rows.lengths) < 8 for rows in expected)
