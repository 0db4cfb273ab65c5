"""The share of repeated n-grams in a response, by hand and by sets of tuples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compass_jax.rewards.penalties import repetition_frac


@pytest.mark.parametrize(
    ("tokens", "ngram", "expected"),
    [
        ([], 2, 0),
        ([7], 2, 0),
        ([1, 2, 3], 2, 0),
        ([1, 1, 1, 1], 1, 0.75),
        ([1, 2, 1, 2, 1], 2, 0.5),
        ([5] * 11, 4, 7 / 8),
        (np.ones(3), 2, 0.5),
    ],
)
def test_share_of_ngrams_said_before(tokens, ngram, expected):
    assert repetition_frac(tokens, ngram) == pytest.approx(expected)


def by_tuples(tokens, ngram):
    grams = [tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


@given(
    st.lists(st.sampled_from([0, 1, 2, 151_935, 262_143]), max_size=40),
    st.integers(1, 30),
)
@settings(deadline=None)
def test_the_share_is_that_of_a_set_of_tuples(tokens, ngram):
    assert repetition_frac(tokens, ngram) == by_tuples(tokens, ngram)


@pytest.mark.parametrize("ngram", [1, 4, 5, 9])
def test_ngrams_of_a_long_response_beyond_64_bits(ngram):
    tokens = np.random.default_rng(0).integers(0, 9, 60_000, np.int32)
    assert len(tokens) ** 4 > 2**63
    assert repetition_frac(tokens, ngram) == by_tuples(tokens.tolist(), ngram)


def test_an_ngram_of_nothing_is_refused():
    with pytest.raises(ValueError, match="ngram = 0 must be positive"):
        repetition_frac([1], 0)


@pytest.mark.parametrize("ngram", [1, 2, 4, 9, 40])
def test_every_length_counts_as_sets_of_tuples_do(ngram):
    rng = np.random.default_rng(ngram)
    for size, vocabulary in ((60, 2), (3000, 3), (3000, 150_000)):
        tokens = rng.integers(0, vocabulary, size, dtype=np.int32)
        tokens[size // 2 :] = tokens[: size - size // 2]  # a half repeats
        grams = [tuple(tokens[i : i + ngram]) for i in range(size - ngram + 1)]
        assert repetition_frac(tokens, ngram) == 1.0 - len(set(grams)) / len(grams)
