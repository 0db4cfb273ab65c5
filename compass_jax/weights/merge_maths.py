"""The steps that merging consists of, each on `p` rows, the parents', of `n` float32 entries."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, UInt32

Rows = Float32[np.ndarray, "p n"]
Entries = Float32[np.ndarray, "n"]
_MAGNITUDE = np.uint32(2**31 - 1)  # a float32's bits without its sign: they order magnitudes
_PARALLEL = 1e-6  # radians: below it SLERP's sines are not divided by each other


def weighted_sum(deltas: Rows, weights: Float32[np.ndarray, "p"]) -> Entries:
    """sum(weight d), added in the parents' order."""
    return (deltas * weights[:, None]).sum(0)


def kept_count(density: float, n: int) -> int:
    """ceil(density n), of the decimal number that was written: 0.1 of 30 is 3."""
    return math.ceil(Fraction(str(density)) * n)


def magnitudes(deltas: Rows) -> UInt32[np.ndarray, "p n"]:
    """The bits of abs(d), which are ordered as abs(d) is."""
    return deltas.view(np.uint32) & _MAGNITUDE


def trimmed(deltas: Rows, least: UInt32[np.ndarray, "p"]) -> Rows:
    """The deltas with every entry below its parent's magnitude in `least` set to zero."""
    return np.where(magnitudes(deltas) >= least[:, None], deltas, np.float32(0))


def agreeing_mean(deltas: Rows, signs: Entries, weights: Float32[np.ndarray, "p"]) -> Entries:
    """sum(weight d) / sum(weight) over the parents whose entry has the elected sign; 0 where none
    has.
    """
    agree = deltas * signs > 0
    total = weighted_sum(np.where(agree, deltas, np.float32(0)), weights)
    shares = weighted_sum(agree.astype(np.float32), weights)
    return total / np.where(shares > 0, shares, np.float32(1))


def drawn(
    key: tuple[int, int, str], start: int, count: int, density: float
) -> Bool[np.ndarray, "n"]:
    """Which of `count` entries from `start` on are kept, each with probability `density`.

    The draws follow from the key (seed, parent, tensor) and the entry's place alone.
    """
    seed, parent, name = key
    word = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    bits = np.random.PCG64(np.random.SeedSequence([seed, parent, word]))
    bits.advance(start)
    return bits.random_raw(count) >> np.uint64(11) < density * 2**53


def slerp_shares(products: Float64[np.ndarray, "2 2"], t: float) -> tuple[float, float]:
    """What the two parents' weights are multiplied by; `products`: their scalar products."""
    norms = math.sqrt(products[0, 0] * products[1, 1])
    angle = math.acos(min(1.0, max(-1.0, products[0, 1] / norms))) if norms > 0 else 0.0
    if min(angle, math.pi - angle) < _PARALLEL:
        return 1 - t, t
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def histograms(rows: Iterable[np.ndarray], bins: int) -> Int64[np.ndarray, "p bins"]:
    """How often each value comes in each row."""
    return np.stack([np.bincount(row, minlength=bins) for row in rows])


def bin_of(histogram: np.ndarray, k: int) -> tuple[int, int]:
    """The bin that holds the k-th entry from above, and which of the bin's entries that is."""
    above = np.cumsum(histogram[::-1])
    i = int(np.searchsorted(above, k))
    place = len(histogram) - 1 - i
    return place, k - int(above[i] - histogram[place])
