"""Methods that merge models which were trained from one base, in float32.

    w = w_base + scale * merged(d_1, ..., d_P),   d_m = w_m - w_base

A method looks at all blocks of the model as often as it needs (`prepare`), and returns a function
of one block. So a model need not fit in memory, and how it is cut into blocks and files changes no
number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from jaxtyping import Float32, Int64, UInt32

from compass_jax.errors import UserError

T = TypeVar("T")
Rows = Float32[np.ndarray, "p n"]
Entries = Float32[np.ndarray, "n"]
_MAGNITUDE = np.uint32(2**31 - 1)  # a float32's bits without its sign: they order magnitudes
_LOW_BITS = 16
_LOW = np.uint32(2**_LOW_BITS - 1)
_HIGH_BINS = 2 ** (31 - _LOW_BITS)


class MergeError(UserError):
    """Models that cannot be merged, or not in the way that was asked for."""


class Block(NamedTuple):
    """`n` consecutive entries of one tensor, in the base and in its `p` parents."""

    name: str  # of the tensor
    base: Entries
    models: Rows

    @property
    def deltas(self) -> Rows:
        """The parents' changes to the base."""
        return self.models - self.base[None]


class Combined(NamedTuple):
    """The part of each parent's delta that a method kept, and the merged delta."""

    kept: Rows
    merged: Entries


Combine = Callable[[Block], Combined]


class Blocks(Protocol):
    """The blocks of the whole model, which can be read as often as one likes."""

    def map(self, function: Callable[[Block], T]) -> Iterable[T]:
        """Yields the values of a pure function of each block, in the blocks' order."""
        ...


class Method(Protocol):
    """A way to merge. Its fields are its settings, those of parents in the parents' order."""

    def prepare(self, blocks: Blocks) -> Combine:
        """Returns the function that merges one block, after any passes over all blocks."""
        ...


@dataclass(frozen=True)
class TaskArithmetic:
    """Weighted sum of the deltas: merged = sum(weight d). A negative weight takes a task away.
    arXiv 2212.04089.
    """

    weights: tuple[float, ...]
    signed = True

    def __post_init__(self) -> None:
        _check_weights(self.weights, self.signed)

    def prepare(self, blocks: Blocks) -> Combine:
        """Returns the sum, which needs no pass over the model."""
        factors = self._factors()
        return lambda block: Combined(block.deltas, _weighted_sum(block.deltas, factors))

    def _factors(self) -> Float32[np.ndarray, "p"]:
        return np.array(self.weights, np.float32)


@dataclass(frozen=True)
class Linear(TaskArithmetic):
    """Weighted mean of the deltas: merged = sum(weight d) / sum(weight). Model soups, arXiv
    2203.05482.
    """

    signed = False

    def _factors(self) -> Float32[np.ndarray, "p"]:
        return super()._factors() / np.float32(sum(self.weights))


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
        for share in self.density:
            if not 1e-6 <= share <= 1:
                raise MergeError(f"density: {share} must be from 1e-6 to 1")

    def prepare(self, blocks: Blocks) -> Combine:
        """Reads the whole model twice, for the exact thresholds."""
        least = kth_magnitudes(blocks, lambda n: [kept_count(x, n) for x in self.density])
        weights = np.array(self.weights, np.float32)

        def combine(block: Block) -> Combined:
            deltas = block.deltas
            kept = np.where(_magnitudes(deltas) >= least[:, None], deltas, np.float32(0))
            signs = np.sign(_weighted_sum(kept, weights))
            return Combined(kept, _agreeing_mean(kept, signs, weights))

        return combine


METHODS: dict[str, type[Method]] = {
    "ties": Ties,
    "linear": Linear,
    "task-arithmetic": TaskArithmetic,
}


def method_of(
    name: str,
    parents: int,
    weights: Sequence[float] | None = None,
    density: Sequence[float] | None = None,
) -> Method:
    """Returns the method of METHODS with this name and these settings.

    Args:
        name: a key of METHODS.
        parents: number of models that are merged.
        weights: a factor for each parent; None: 1 for each.
        density: the share of its entries that each parent keeps, one for all or one for each;
            None: 0.2.

    Raises MergeError for settings that the method does not have, or that are out of range.
    """
    if name not in METHODS:
        raise MergeError(
            f"method {name!r}: there is no such method; there are {', '.join(METHODS)}"
        )
    has = [field.name for field in dataclasses.fields(cast(Any, METHODS[name]))]
    if density is not None and "density" not in has:
        raise MergeError(f"density: {name} has none; it has {', '.join(has)} alone")
    if density is not None and len(density) == 1:
        density = [*density] * parents
    for setting, values in (("weights", weights), ("density", density)):
        if values is not None and len(values) != parents:
            raise MergeError(f"{setting}: {len(values)} numbers for {parents} models")
    settings = {
        "weights": tuple(weights or [1.0] * parents),
        "density": tuple(density or [0.2] * parents),
    }
    return METHODS[name](**{setting: settings[setting] for setting in has})


def check_factor(name: str, value: float, signed: bool = True) -> None:
    """Raises MergeError for a factor that is neither 0 nor from 1e-6 to 1e6, which float32
    multiplies without loss; a negative one needs `signed`.
    """
    if value != 0 and not (1e-6 <= abs(value) <= 1e6 and (signed or value > 0)):
        of_size = "of magnitude 1e-6 to 1e6" if signed else "from 1e-6 to 1e6"
        raise MergeError(f"{name}: {value} must be 0, or {of_size}")


def _check_weights(weights: tuple[float, ...], signed: bool = False) -> None:
    """Raises MergeError for a weight that `check_factor` refuses, and where all are 0."""
    for weight in weights:
        check_factor("weights", weight, signed)
    if not any(weights):
        raise MergeError("weights: all are 0, which leaves nothing to merge")


def kept_count(density: float, n: int) -> int:
    """Returns ceil(density n) of the decimal number that was written: 0.1 of 30 is 3."""
    return math.ceil(Fraction(str(density)) * n)


def _weighted_sum(deltas: Rows, weights: Float32[np.ndarray, "p"]) -> Entries:
    """Returns sum(weight d), added in the parents' order."""
    return (deltas * weights[:, None]).sum(0)


def _magnitudes(deltas: Rows) -> UInt32[np.ndarray, "p n"]:
    """Returns the bits of abs(d), which are ordered as abs(d) is."""
    return deltas.view(np.uint32) & _MAGNITUDE


def _agreeing_mean(deltas: Rows, signs: Entries, weights: Float32[np.ndarray, "p"]) -> Entries:
    """Returns sum(weight d) / sum(weight) over the parents whose entry has the elected sign, and 0
    where none has.
    """
    agree = deltas * signs > 0
    total = _weighted_sum(np.where(agree, deltas, np.float32(0)), weights)
    shares = _weighted_sum(agree.astype(np.float32), weights)
    return total / np.where(shares > 0, shares, np.float32(1))


def kth_magnitudes(
    blocks: Blocks, counts: Callable[[int], Sequence[int]]
) -> UInt32[np.ndarray, "p"]:
    """Returns the k-th largest magnitude of each parent's whole delta, exactly, as bits.

    Two passes count bits: the upper half of them, then the lower half of those that have the k-th
    entry's upper half. Counts are integers, so the order of blocks changes nothing.

    counts: the number of all entries -> k of each parent.
    """

    def upper(block: Block) -> np.ndarray:
        return _histograms(_magnitudes(block.deltas) >> _LOW_BITS, _HIGH_BINS)

    high = reduce(np.add, blocks.map(upper))
    wanted = counts(int(high[0].sum()))
    found = [_bin_of(row, k) for row, k in zip(high, wanted, strict=True)]
    places = np.array([place for place, _ in found], np.uint32)

    def lower(block: Block) -> np.ndarray:
        rows = zip(_magnitudes(block.deltas), places, strict=True)
        return _histograms(
            (bits[bits >> _LOW_BITS == at] & _LOW for bits, at in rows), 2**_LOW_BITS
        )

    low = reduce(np.add, blocks.map(lower))
    rest = [_bin_of(row, left)[0] for row, (_, left) in zip(low, found, strict=True)]
    return (places << _LOW_BITS) | np.array(rest, np.uint32)


def _histograms(rows: Iterable[np.ndarray], bins: int) -> Int64[np.ndarray, "p bins"]:
    """Returns how often each value comes in each row."""
    return np.stack([np.bincount(row, minlength=bins) for row in rows])


def _bin_of(histogram: np.ndarray, k: int) -> tuple[int, int]:
    """Returns the bin that holds the k-th entry from above, and that entry's rank in the bin."""
    above = np.cumsum(histogram[::-1])
    i = int(np.searchsorted(above, k))
    place = len(histogram) - 1 - i
    return place, k - int(above[i] - histogram[place])


def routers_from(which: str) -> int | None:
    """Returns `routers_from` of `merge_folders`. Raises MergeError for what is no choice."""
    if which in ("merge", "base"):
        return None if which == "merge" else 0
    if not which.isascii() or not which.isdigit() or int(which) < 1:
        raise MergeError(f"--routers {which}: give merge, base, or a model's number from 1")
    return int(which)


def shard_bytes(gib: float | None) -> int | None:
    """Returns the bytes of a shard. Raises MergeError where it would be no size."""
    if gib is None:
        return None
    if not 2**-20 <= gib <= 2**20:
        raise MergeError(f"--shard-gib {gib}: must be from a KiB (9.6e-7) to a million")
    return int(gib * 2**30)
