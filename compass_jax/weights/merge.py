"""Ways to merge models that were trained from one base: the maths, in float32, on blocks.

A method looks at all blocks of the model as often as it needs (`prepare`), and returns what is done
with one of them. So a model need not fit in memory, and how it is cut into blocks and files changes
no number.

    w = w_base + scale * merged(d_1, ..., d_P),   d_m = w_m - w_base
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, UInt32

from compass_jax.errors import UserError

Deltas = Float32[np.ndarray, "p n"]
Entries = Float32[np.ndarray, "n"]
_MAGNITUDE = np.uint32(2**31 - 1)  # a float32's bits without its sign: they order magnitudes
_LOW_BITS = 16
_HIGH_BINS = 2 ** (31 - _LOW_BITS)
_PARALLEL = 1e-6  # radians: below it SLERP's sines are not divided by each other


class MergeError(UserError):
    """Models that cannot be merged, or not in the way that was asked for."""


class Block(NamedTuple):
    """`n` entries of one tensor that follow each other, and what `p` parents changed in them."""

    name: str  # of the tensor
    start: int  # the first entry's place in the flattened tensor
    base: Entries
    deltas: Deltas


class Combined(NamedTuple):
    """What a method kept of each parent's delta, and the merged delta."""

    kept: Deltas
    merged: Entries


Combine = Callable[[Block], Combined]


class Method(Protocol):
    """A way to merge. Its fields are its settings, those of parents in the parents' order."""

    def prepare(self, blocks: Iterable[Block]) -> Combine:
        """What is done with each block; `blocks`, the whole model, can be gone through again."""
        ...


@dataclass(frozen=True)
class Linear:
    """Weighted mean of the parents: merged = sum(weight d) / sum(weight). Model soups, arXiv
    2203.05482.
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_weights(self.weights)

    def prepare(self, blocks: Iterable[Block]) -> Combine:
        """The mean, which needs no look at the whole model."""
        shares = _factors(self.weights) / np.float32(sum(self.weights))
        return lambda block: Combined(block.deltas, weighted_sum(block.deltas, shares))


@dataclass(frozen=True)
class TaskArithmetic:
    """Weighted sum of the deltas: merged = sum(weight d). A negative weight takes a task away.
    arXiv 2212.04089.
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_weights(self.weights, signed=True)

    def prepare(self, blocks: Iterable[Block]) -> Combine:
        """The sum, which needs no look at the whole model."""
        shares = _factors(self.weights)
        return lambda block: Combined(block.deltas, weighted_sum(block.deltas, shares))


@dataclass(frozen=True)
class Dare:
    """Each entry of a delta is kept with probability `density` and divided by it, else dropped;
    then the weighted sum. arXiv 2311.03099, equation 1 (its drop rate p is 1 - density).
    """

    weights: tuple[float, ...]
    density: tuple[float, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        _check_weights(self.weights, signed=True)
        _check_density(self.density)

    def prepare(self, blocks: Iterable[Block]) -> Combine:
        """Draws and sum, which need no look at the whole model."""
        shares = _factors(self.weights)
        scales = 1 / _factors(self.density)

        def combine(block: Block) -> Combined:
            kept = block.deltas * scales[:, None]
            for parent, density in enumerate(self.density):
                key = (self.seed, parent, block.name)
                kept[parent] *= drawn(key, block.start, kept.shape[1], density)
            return Combined(kept, weighted_sum(kept, shares))

        return combine


@dataclass(frozen=True)
class Ties:
    """TIES: of each parent's whole delta the ceil(density n) largest magnitudes are kept, with all
    ties; signs are elected; the weighted mean is taken over entries that agree. arXiv 2306.01708,
    algorithm 1.
    """

    weights: tuple[float, ...]
    density: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_weights(self.weights)
        _check_density(self.density)

    def prepare(self, blocks: Iterable[Block]) -> Combine:
        """Looks at the whole model twice, for the exact thresholds."""
        least = kth_magnitudes(blocks, lambda n: [kept_count(x, n) for x in self.density])
        weights = _factors(self.weights)

        def combine(block: Block) -> Combined:
            kept = trimmed(block.deltas, least)
            signs = np.sign(weighted_sum(kept, weights))
            return Combined(kept, agreeing_mean(kept, signs, weights))

        return combine


@dataclass(frozen=True)
class OfficialTies:
    """TIES as its authors' code has it (ties_merging.py of prateeky2806/ties-merging): parents have
    no weights, int(density n) + 1 entries are kept, and a sum of zero takes the sign that most sums
    of the whole model have; where neither has more, the negative one.
    """

    density: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_density(self.density)

    def prepare(self, blocks: Iterable[Block]) -> Combine:
        """Looks at the whole model three times: thresholds, then the majority's sign."""
        least = kth_magnitudes(blocks, lambda n: [min(int(x * n) + 1, n) for x in self.density])
        signs = (np.sign(trimmed(block.deltas, least).sum(0)) for block in blocks)
        majority = sum(int(np.sum(sign, dtype=np.int64)) for sign in signs)
        fallback = np.float32(1 if majority > 0 else -1)
        weights = np.ones(len(self.density), np.float32)

        def combine(block: Block) -> Combined:
            kept = trimmed(block.deltas, least)
            sign = np.sign(kept.sum(0))
            sign[sign == 0] = fallback
            return Combined(kept, agreeing_mean(kept, sign, weights))

        return combine


@dataclass(frozen=True)
class Slerp:
    """Spherical interpolation of two parents' weights, tensor by tensor: with angle o between them
    and t = weight_2 / (weight_1 + weight_2),

        w = sin((1 - t) o) / sin(o) w_1 + sin(t o) / sin(o) w_2

    and the straight line where they are parallel or opposite. Shoemake, SIGGRAPH 1985.
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_weights(self.weights)
        if len(self.weights) != 2:
            raise MergeError(f"slerp merges two models, {len(self.weights)} were given")

    def prepare(self, blocks: Iterable[Block]) -> Combine:
        """Looks at the whole model once, for the angles."""
        products: dict[str, np.ndarray] = defaultdict(lambda: np.zeros((2, 2)))
        for block in blocks:
            both = block.deltas.astype(np.float64) + block.base
            products[block.name] += both @ both.T
        t = self.weights[1] / sum(self.weights)
        shares = {name: slerp_shares(product, t) for name, product in products.items()}

        def combine(block: Block) -> Combined:
            one, two = shares[block.name]
            of_base = np.float32(one + two - 1)
            merged = weighted_sum(block.deltas, _factors((one, two))) + of_base * block.base
            return Combined(block.deltas, merged)

        return combine


METHODS: dict[str, type[Method]] = {
    "ties": Ties,
    "ties-official": OfficialTies,
    "linear": Linear,
    "task-arithmetic": TaskArithmetic,
    "dare": Dare,
    "slerp": Slerp,
}


def method_of(
    name: str,
    parents: int,
    weights: Sequence[float] | None = None,
    density: Sequence[float] | None = None,
    seed: int | None = None,
) -> Method:
    """The method of METHODS with this name and these settings.

    Args:
        name: as in METHODS.
        parents: how many models are merged.
        weights: a factor for each parent; None: 1 for each.
        density: the share of its entries that each parent keeps, one for all or one for each, in
            (0, 1]; None: 0.2.
        seed: of random drops; None: 0.

    Raises MergeError for settings that the method does not have, or cannot have.
    """
    if name not in METHODS:
        raise MergeError(
            f"method {name!r}: there is no such method; there are {', '.join(METHODS)}"
        )
    given = {"weights": weights, "density": density, "seed": seed}
    has = [field.name for field in dataclasses.fields(cast(Any, METHODS[name]))]
    for setting, value in given.items():
        if value is not None and setting not in has:
            raise MergeError(f"{setting}: {name} has none; it has {', '.join(has)} alone")
    if density is not None and len(density) == 1:
        density = [*density] * parents
    for setting, values in (("weights", weights), ("density", density)):
        if values is not None and len(values) != parents:
            raise MergeError(f"{setting}: {len(values)} numbers for {parents} models")
    settings = {
        "weights": tuple(weights or [1.0] * parents),
        "density": tuple(density or [0.2] * parents),
        "seed": seed or 0,
    }
    return METHODS[name](**{setting: settings[setting] for setting in has})


def _factors(values: tuple[float, ...]) -> Float32[np.ndarray, "p"]:
    return np.array(values, np.float32)


def _check_weights(weights: tuple[float, ...], signed: bool = False) -> None:
    """MergeError for weights that are no finite numbers, or without `signed` below zero or all
    zero.
    """
    for weight in weights:
        if not math.isfinite(weight) or (weight < 0 and not signed):
            must = "finite" if signed else "a finite number of at least 0"
            raise MergeError(f"weights: {weight} must be {must}")
    if not signed and not sum(weights) > 0:
        raise MergeError("weights: all are 0, which leaves nothing to merge")


def _check_density(density: tuple[float, ...]) -> None:
    """MergeError for a share outside (0, 1]."""
    for share in density:
        if not 0 < share <= 1:
            raise MergeError(f"density: {share} must be above 0 and at most 1")


def weighted_sum(deltas: Deltas, weights: Float32[np.ndarray, "p"]) -> Entries:
    """sum(weight d), added in the parents' order."""
    return (deltas * weights[:, None]).sum(0)


def kept_count(density: float, n: int) -> int:
    """ceil(density n), of the decimal number that was written: 0.1 of 30 is 3."""
    return math.ceil(Fraction(str(density)) * n)


def magnitudes(deltas: Deltas) -> UInt32[np.ndarray, "p n"]:
    """The bits of abs(d), which are ordered as abs(d) is."""
    return deltas.view(np.uint32) & _MAGNITUDE


def trimmed(deltas: Deltas, least: UInt32[np.ndarray, "p"]) -> Deltas:
    """The deltas with every entry below its parent's magnitude in `least` set to zero."""
    return np.where(magnitudes(deltas) >= least[:, None], deltas, np.float32(0))


def agreeing_mean(deltas: Deltas, signs: Entries, weights: Float32[np.ndarray, "p"]) -> Entries:
    """sum(weight d) / sum(weight) over the parents whose entry has the elected sign; 0 where none
    has.
    """
    agree = deltas * signs > 0
    total = weighted_sum(np.where(agree, deltas, np.float32(0)), weights)
    shares = weighted_sum(agree.astype(np.float32), weights)
    return np.divide(total, shares, out=np.zeros_like(total), where=shares > 0)


def kth_magnitudes(
    blocks: Iterable[Block], counts: Callable[[int], Sequence[int]]
) -> UInt32[np.ndarray, "p"]:
    """The k-th largest magnitude of each parent's whole delta, exactly, as bits.

    Two passes count bits: the upper half of them, then the lower half of those that have the k-th
    entry's upper half. Counts are integers, so the order of blocks changes nothing.

    counts: the number of all entries -> k of each parent.
    """
    high = _histograms(blocks, _HIGH_BINS, lambda bits: bits >> _LOW_BITS)
    wanted = counts(int(high[0].sum()))
    upper = [_bin_of(row, k) for row, k in zip(high, wanted, strict=True)]
    places = np.array([place for place, _ in upper], np.uint32)

    def lower(bits: np.ndarray, place: np.uint32) -> np.ndarray:
        return bits[bits >> _LOW_BITS == place] & np.uint32(2**_LOW_BITS - 1)

    low = _histograms(blocks, 2**_LOW_BITS, lower, places)
    rest = [_bin_of(row, left)[0] for row, (_, left) in zip(low, upper, strict=True)]
    return (places << _LOW_BITS) | np.array(rest, np.uint32)


def _histograms(
    blocks: Iterable[Block],
    bins: int,
    part: Callable[..., np.ndarray],
    places: np.ndarray | None = None,
) -> Int64[np.ndarray, "p {bins}"]:
    """How often each value of `part` of a magnitude's bits comes, for each parent."""
    total: np.ndarray | int = 0
    for block in blocks:
        rows = magnitudes(block.deltas)
        parts = map(part, rows) if places is None else map(part, rows, places)
        total = total + np.stack([np.bincount(values, minlength=bins) for values in parts])
    return np.asarray(total)


def _bin_of(histogram: np.ndarray, k: int) -> tuple[int, int]:
    """The bin that holds the k-th entry from above, and which of the bin's entries that is."""
    above = np.cumsum(histogram[::-1])
    i = int(np.searchsorted(above, k))
    place = len(histogram) - 1 - i
    return place, k - int(above[i] - histogram[place])


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
