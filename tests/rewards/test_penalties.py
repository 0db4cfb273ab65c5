"""The share of repeated n-grams in a response, computed by hand."""

import numpy as np
import pytest

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
