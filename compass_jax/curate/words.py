"""Texts as words, and runs of words as 64-bit numbers: what duplicates, contamination and
repetition are told by.

A number stands for its words in every process. Two of a million runs are the same number by chance
once in 40 million times.
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

# scripts that put no blanks between words: a character is a word (Thai, Lao, Burmese, Khmer, kana,
# Chinese)
_ALONE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
# signs that change what a question asks; other punctuation changes nothing
_SIGNS = "+-*/^=<>%&|~\\"
_WORD = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+|[{re.escape(_SIGNS)}]")
MOST_KNOWN = 1_000_000  # words whose numbers are kept
_BASE = 0x9E3779B97F4A7C15  # odd, so that a power of it has an inverse mod 2^64


class _Known(dict[str, int]):
    """Word -> its number. A corpus with ever new words does not fill the memory."""

    def __missing__(self, word: str) -> int:
        if len(self) >= MOST_KNOWN:
            self.clear()
        found = self[word] = xxhash.xxh3_64_intdigest(word.encode())
        return found


_known = _Known()


def words(text: str) -> list[str]:
    """The words of a text, in one case and one of Unicode's forms (NFKC); signs of arithmetic are
    words, white space and other punctuation are left out.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return _WORD.findall(text.casefold())


def numbers_in(found: list[str]) -> list[str]:
    """The words with a digit, and the signs beside them, sorted: the same whatever the order of the
    sentences.
    """
    digits = [not word.isalpha() and any(map(str.isdigit, word)) for word in found]
    if True not in digits:
        return []
    return sorted(
        word
        for i, word in enumerate(found)
        if digits[i] or (word in _SIGNS and True in digits[max(i - 1, 0) : i + 2])
    )


def hashed(found: list[str]) -> Numbers:
    """uint64 [words]: the number of each word."""
    return np.fromiter(map(_known.__getitem__, found), np.uint64, len(found))


def combined(parts: Sequence[Numbers]) -> Numbers:
    """uint64, of the shape of each part: sum_i parts[i] B^(i+1) mod 2^64, a polynomial hash of
    what stands at one place of all parts.
    """
    total = parts[0] * _factor(0)
    for i, part in enumerate(parts[1:], 1):
        total += part * _factor(i)
    return total


@functools.cache
def _factor(i: int) -> np.uint64:
    return np.uint64(pow(_BASE, i + 1, 2**64))


def runs(of_words: Numbers, length: int) -> Numbers:
    """uint64 [words - length + 1]: a number for each run of `length` words, in order; of a shorter
    text one for all of it, of an empty one none.
    """
    length = min(length, len(of_words))
    if not length:
        return np.zeros(0, np.uint64)
    count = len(of_words) - length + 1
    return combined([of_words[i : i + count] for i in range(length)])


def repeated_share(things: Sequence[object]) -> float:
    """The share of entries that equal an earlier one, in [0, 1); 0 of none."""
    return 1 - len(set(things)) / len(things) if things else 0.0
