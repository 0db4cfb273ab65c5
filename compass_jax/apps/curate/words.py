"""Words and runs of words of texts as 64-bit hashes, for duplicate, contamination and repetition
checks.

A hash is the same in every process. In a set of a million runs, two runs collide with a probability
of 1 in 40 million.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]

# scripts without spaces between words, where each character counts as a word (Thai, Lao, Burmese,
# Khmer, kana, Chinese)
_ALONE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
# signs that change the meaning of a question; other punctuation is ignored
_SIGNS = "+-*/^=<>%&|~\\"
_WORD = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+|[{re.escape(_SIGNS)}]")
_BASE = 0x9E3779B97F4A7C15  # odd, so that a power of it has an inverse mod 2^64


@functools.lru_cache(maxsize=1_000_000)
def _hash(word: str) -> int:
    return xxhash.xxh3_64_intdigest(word.encode())


def words(text: str) -> list[str]:
    """Returns the words of a text, case-folded and in Unicode's NFKC form.

    Arithmetic signs are words; white space and other punctuation are dropped.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return _WORD.findall(text.casefold())


def numbers_in(tokens: list[str]) -> list[str]:
    """Returns the words with a digit and the signs next to them, sorted."""
    digits = [not word.isalpha() and any(map(str.isdigit, word)) for word in tokens]
    if True not in digits:
        return []
    return sorted(
        word
        for i, word in enumerate(tokens)
        if digits[i] or (word in _SIGNS and True in digits[max(i - 1, 0) : i + 2])
    )


def hashed(tokens: list[str]) -> Numbers:
    """Returns the hash of each word, uint64 [words]."""
    return np.fromiter(map(_hash, tokens), np.uint64, len(tokens))


def combined(parts: Sequence[Numbers]) -> Numbers:
    """Returns sum_i parts[i] B^(i+1) mod 2^64, a hash across the parts, uint64."""
    total = parts[0] * _factor(0)
    for i, part in enumerate(parts[1:], 1):
        total += part * _factor(i)
    return total


@functools.cache
def _factor(i: int) -> np.uint64:
    return np.uint64(pow(_BASE, i + 1, 2**64))


def runs(of_words: Numbers, length: int) -> Numbers:
    """Returns a hash for each run of `length` consecutive words, uint64 [words - length + 1].

    A shorter text has one hash, of all its words; an empty text has no hash.
    """
    length = min(length, len(of_words))
    if not length:
        return np.zeros(0, np.uint64)
    count = len(of_words) - length + 1
    return combined([of_words[i : i + count] for i in range(length)])
