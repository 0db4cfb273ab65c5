"""Words and the hashes of runs of words, checked with Python's integers."""

import numpy as np
import pytest
import xxhash

from compass_jax.apps.curate.words import hashed, numbers_in, runs, words

BASE = 0x9E3779B97F4A7C15


def run_of(names):
    """Computes sum_i w_i B^(i+1) mod 2^64 with Python's integers."""
    numbers = [xxhash.xxh3_64_intdigest(name.encode()) for name in names]
    return sum(w * BASE ** (i + 1) for i, w in enumerate(numbers)) % 2**64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Was ist  3+4?\n", ["was", "ist", "3", "+", "4"]),
        ("STRASSE Straße", ["strasse", "strasse"]),
        ("don't", ["don", "t"]),
        ("x² ﬁve １２", ["x2", "five", "12"]),
        ("今天 is 好", ["今", "天", "is", "好"]),
        ("ที่", ["ท", "ี", "่"]),
        ("\\frac{1}{2}", ["\\", "frac", "1", "2"]),
        (" ,;! ", []),
    ],
)
def test_words(text, expected):
    assert words(text) == expected


def test_a_number_stands_for_each_run_of_words():
    names = ["a", "b", "c", "d", "a", "b", "c"]
    expected = [run_of(names[i : i + 3]) for i in range(5)]
    actual = runs(hashed(names), 3)
    assert actual.dtype == np.uint64 and actual.tolist() == expected
    assert expected[0] == expected[4] and len(set(expected)) == 4


def test_a_short_text_is_one_run_and_an_empty_one_none():
    assert runs(hashed(["a", "b"]), 3).tolist() == [run_of(["a", "b"])]
    assert runs(hashed([]), 3).tolist() == []


@pytest.mark.parametrize(
    ("text", "other", "is_same"),
    [
        ("Tom has 3 apples. Ann has 5.", "Ann has 5. Tom has 3 apples.", True),
        ("12 - 7", "12-7", True),
        ("12 - 7", "12 + 7", False),
        ("a well-known 5", "a well known 5", True),
        ("3.5", "35", False),
        ("none", "other", True),
    ],
)
def test_questions_have_the_same_numbers_whatever_their_order(text, other, is_same):
    assert (numbers_in(words(text)) == numbers_in(words(other))) is is_same
