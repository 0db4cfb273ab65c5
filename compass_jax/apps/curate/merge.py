"""Methods that merge models trained from one base, in float32.

    w = w_base + scale * merged(d_1, ..., d_P),   d_m = w_m - w_base

A method reads all blocks of the model as often as it needs (`prepare`) and returns a function of
one block. A model therefore need not fit in memory, and its division into blocks and files does not
change the result.
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
from jaxtyping import Float32, UInt32

from compass_jax.base.errors import UserError

T = TypeVar("T")
Rows = Float32[np.ndarray, "p n"]
Entries = Float32[np.ndarray, "n"]
_MAGNITUDE = np.uint32(2**31 - 1)  # a float32's bits without its sign: they order magnitudes
_LOW_BITS = 16
_LOW = np.uint32(2**_LOW_BITS - 1)


class MergeError(UserError):
    """The models cannot be merged, or not with the requested settings."""


class Block(NamedTuple):
    """`n` consecutive entries of one tensor, in the base and in its `p` parents."""

    name: str  # of the tensor
    base: Entries
    models: Rows

    @property
    def deltas(self) -> Rows:
        """The parents' differences from the base."""
        return self.models - self.base[None]


class Combined(NamedTuple):
    """The part of each parent's delta that a method kept, and the merged delta."""

    trimmed: Rows
    merged: Entries


Combine = Callable[[Block], Combined]


class Blocks(Protocol):
    """The blocks of a model, which can be iterated repeatedly."""

    def map(self, function: Callable[[Block], T]) -> Iterable[T]:
        """Yields the value of a pure function for each block, in the blocks' order."""
        ...


class Method(Protocol):
    """A merge method. Its fields are its settings; those per parent are in their order."""

    def prepare(self, blocks: Blocks) -> Combine:
        """Returns the function that merges one block, after any passes over all blocks."""
        ...


@dataclass(frozen=True)
class Linear:
    """The mean sum(weight d) / sum(weight). Model soups, arXiv 2203.05482."""

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_weights(self.weights)

    def prepare(self, blocks: Blocks) -> Combine:
        """Returns the weighted mean; it needs no pass over the model."""
        factors = np.array(self.weights, np.float32) / np.float32(sum(self.weights))
        return lambda block: Combined(block.deltas, _weighted_sum(block.deltas, factors))


@dataclass(frozen=True)
class Ties:
    """TIES merging: trim, elect signs, and average the entries that agree.

    Of each parent's whole delta it keeps the ceil(density n) entries of largest magnitude, with all
    ties. It elects a sign for each entry and takes the weighted mean over the parents that agree
    with it. arXiv 2306.01708, algorithm 1.
    """

    weights: tuple[float, ...]
    density: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_weights(self.weights)
        for share in self.density:
            if not 1e-6 <= share <= 1:
                raise MergeError(f"density: {share} must be from 1e-6 to 1")

    def prepare(self, blocks: Blocks) -> Combine:
        """Returns the merge of a block. Reads the model twice to compute the exact thresholds."""
        thresholds = kth_magnitudes(blocks, lambda n: [kept_count(x, n) for x in self.density])
        weights = np.array(self.weights, np.float32)

        def combine(block: Block) -> Combined:
            deltas = block.deltas
            trimmed = np.where(_magnitudes(deltas) >= thresholds[:, None], deltas, np.float32(0))
            signs = np.sign(_weighted_sum(trimmed, weights))
            return Combined(trimmed, _agreeing_mean(trimmed, signs, weights))

        return combine


METHODS: dict[str, type[Method]] = {"ties": Ties, "linear": Linear}


def method_of(
    name: str,
    parents: int,
    weights: Sequence[float] | None = None,
    density: Sequence[float] | None = None,
) -> Method:
    """Returns the method of METHODS with this name and these settings.

    Args:
        name: a key of METHODS.
        parents: number of models to merge.
        weights: one factor per parent; None for 1 each.
        density: the share of entries that each parent keeps, one value for all or one each; None:
            0.2.

    Raises MergeError for settings that the method does not have or that are out of range.
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
    """Raises MergeError unless a factor is 0 or has a magnitude from 1e-6 to 1e6, which float32
    multiplies without loss. A negative factor also needs `signed`.
    """
    if value != 0 and not (1e-6 <= abs(value) <= 1e6 and (signed or value > 0)):
        of_size = "of magnitude 1e-6 to 1e6" if signed else "from 1e-6 to 1e6"
        raise MergeError(f"{name}: {value} must be 0, or {of_size}")


def _check_weights(weights: tuple[float, ...]) -> None:
    """Raises MergeError if `check_factor` refuses a weight or if all weights are 0."""
    for weight in weights:
        check_factor("weights", weight, signed=False)
    if not any(weights):
        raise MergeError("weights: all are 0, which leaves nothing to merge")


def kept_count(density: float, n: int) -> int:
    """Returns ceil(density n), computed from density's decimal form: 0.1 of 30 is 3."""
    return math.ceil(Fraction(str(density)) * n)


def _weighted_sum(deltas: Rows, weights: Float32[np.ndarray, "p"]) -> Entries:
    """Returns sum(weight d), accumulated in the order of the parents."""
    return (deltas * weights[:, None]).sum(0)


def _magnitudes(deltas: Rows) -> UInt32[np.ndarray, "p n"]:
    """Returns the bits of abs(d) as integers, which sort in the same order as abs(d)."""
    return deltas.view(np.uint32) & _MAGNITUDE


def _agreeing_mean(deltas: Rows, signs: Entries, weights: Float32[np.ndarray, "p"]) -> Entries:
    """Returns the weighted mean over the parents of the elected sign; 0 without any."""
    agree = deltas * signs > 0
    total = _weighted_sum(np.where(agree, deltas, np.float32(0)), weights)
    shares = _weighted_sum(agree.astype(np.float32), weights)
    return total / np.where(shares > 0, shares, np.float32(1))


def kth_magnitudes(
    blocks: Blocks, counts: Callable[[int], Sequence[int]]
) -> UInt32[np.ndarray, "p"]:
    """Returns the exact k-th largest magnitude of each parent's whole delta, as bits.

    Two passes build histograms of the bits: first of the upper half, then of the lower half of the
    entries whose upper half equals the k-th entry's. Counts are integers, so the order of the
    blocks does not change the result.

    Args:
        blocks: the blocks of the model.
        counts: maps the total number of entries to k for each parent.
    """

    def upper(block: Block) -> np.ndarray:
        rows = _magnitudes(block.deltas) >> _LOW_BITS
        return np.stack([np.bincount(row, minlength=2 ** (31 - _LOW_BITS)) for row in rows])

    high = reduce(np.add, blocks.map(upper))
    ks = counts(int(high[0].sum()))
    bins = [_bin_of(row, k) for row, k in zip(high, ks, strict=True)]
    high_bits = np.array([high_bit for high_bit, _ in bins], np.uint32)

    def lower(block: Block) -> np.ndarray:
        rows = zip(_magnitudes(block.deltas), high_bits, strict=True)
        low = (bits[bits >> _LOW_BITS == high_bit] & _LOW for bits, high_bit in rows)
        return np.stack([np.bincount(row, minlength=2**_LOW_BITS) for row in low])

    low = reduce(np.add, blocks.map(lower))
    low_bits = [_bin_of(row, rank)[0] for row, (_, rank) in zip(low, bins, strict=True)]
    return (high_bits << _LOW_BITS) | np.array(low_bits, np.uint32)


def _bin_of(histogram: np.ndarray, k: int) -> tuple[int, int]:
    """Returns the bin of the k-th largest entry, and that entry's rank within the bin."""
    above = np.cumsum(histogram[::-1])
    i = int(np.searchsorted(above, k))
    place = len(histogram) - 1 - i
    return place, k - int(above[i] - histogram[place])


def routers_from(which: str) -> int | None:
    """Returns the argument of `merge_folders`. Raises MergeError for another choice."""
    if which in ("merge", "base"):
        return None if which == "merge" else 0
    if not which.isascii() or not which.isdigit() or int(which) < 1:
        raise MergeError(f"--routers {which}: give merge, base, or a model's number from 1")
    return int(which)


def shard_bytes(gib: float | None) -> int | None:
    """Returns the shard size in bytes. Raises MergeError if it is out of range."""
    if gib is None:
        return None
    if not 2**-20 <= gib <= 2**20:
        raise MergeError(f"--shard-gib {gib}: must be from a KiB (9.6e-7) to a million")
    return int(gib * 2**30)
