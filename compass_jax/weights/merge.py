"""Ways to merge models that were trained from one base, in float32.

A method looks at all blocks of the model as often as it needs (`prepare`), and returns what is done
with one of them. So a model need not fit in memory, and how it is cut into blocks and files changes
no number.

    w = w_base + scale * merged(d_1, ..., d_P),   d_m = w_m - w_base
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from jaxtyping import Float32, UInt32

from compass_jax.errors import UserError
from compass_jax.weights.merge_maths import (
    Entries,
    Rows,
    agreeing_mean,
    bin_of,
    drawn,
    histograms,
    kept_count,
    magnitudes,
    slerp_shares,
    trimmed,
    weighted_sum,
)

T = TypeVar("T")
_LOW_BITS = 16
_LOW = np.uint32(2**_LOW_BITS - 1)
_HIGH_BINS = 2 ** (31 - _LOW_BITS)


class MergeError(UserError):
    """Models that cannot be merged, or not in the way that was asked for."""


class Block(NamedTuple):
    """`n` entries of one tensor that follow each other, in the base and in its `p` parents."""

    name: str  # of the tensor
    start: int  # the first entry's place in the flattened tensor
    base: Entries
    models: Rows

    @property
    def deltas(self) -> Rows:
        """What the parents changed."""
        return self.models - self.base[None]


class Combined(NamedTuple):
    """What a method kept of each parent's delta, and the merged delta."""

    kept: Rows
    merged: Entries


Combine = Callable[[Block], Combined]


class Blocks(Protocol):
    """The whole model, which can be gone through as often as one likes."""

    def map(self, function: Callable[[Block], T]) -> Iterable[T]:
        """What a pure function gives of each block, in the blocks' order."""
        ...


class Method(Protocol):
    """A way to merge. Its fields are its settings, those of parents in the parents' order."""

    def prepare(self, blocks: Blocks) -> Combine:
        """What is done with each block, once the method has seen what it needs of them all."""
        ...


@dataclass(frozen=True)
class Linear:
    """Weighted mean of the parents: merged = sum(weight d) / sum(weight). Model soups, arXiv
    2203.05482.
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_weights(self.weights)

    def prepare(self, blocks: Blocks) -> Combine:
        """The mean, which needs no look at the whole model."""
        shares = _factors(self.weights) / np.float32(sum(self.weights))
        return lambda block: _summed(block.deltas, shares)


@dataclass(frozen=True)
class TaskArithmetic:
    """Weighted sum of the deltas: merged = sum(weight d). A negative weight takes a task away.
    arXiv 2212.04089.
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_weights(self.weights, signed=True)

    def prepare(self, blocks: Blocks) -> Combine:
        """The sum, which needs no look at the whole model."""
        shares = _factors(self.weights)
        return lambda block: _summed(block.deltas, shares)


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
        if self.seed < 0:
            raise MergeError(f"seed: {self.seed} must be at least 0")

    def prepare(self, blocks: Blocks) -> Combine:
        """Draws and sum, which need no look at the whole model."""
        shares = _factors(self.weights)
        shares_kept = _factors(self.density)

        def combine(block: Block) -> Combined:
            kept = block.deltas / shares_kept[:, None]
            for parent, density in enumerate(self.density):
                key = (self.seed, parent, block.name)
                kept[parent] *= drawn(key, block.start, kept.shape[1], density)
            return _summed(kept, shares)

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

    def prepare(self, blocks: Blocks) -> Combine:
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

    def prepare(self, blocks: Blocks) -> Combine:
        """Looks at the whole model three times: thresholds, then the majority's sign."""
        least = kth_magnitudes(blocks, lambda n: [min(int(x * n) + 1, n) for x in self.density])

        def balance(block: Block) -> int:
            signs = np.sign(trimmed(block.deltas, least).sum(0))
            return int(np.count_nonzero(signs > 0)) - int(np.count_nonzero(signs < 0))

        majority = np.float32(1 if sum(blocks.map(balance)) > 0 else -1)
        weights = np.ones(len(self.density), np.float32)

        def combine(block: Block) -> Combined:
            kept = trimmed(block.deltas, least)
            signs = np.sign(kept.sum(0))
            signs[signs == 0] = majority
            return Combined(kept, agreeing_mean(kept, signs, weights))

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

    def prepare(self, blocks: Blocks) -> Combine:
        """Looks at the whole model once, for the angles."""
        products: dict[str, np.ndarray] = defaultdict(lambda: np.zeros((2, 2)))

        def product(block: Block) -> tuple[str, np.ndarray]:
            both = block.models.astype(np.float64)
            return block.name, both @ both.T

        for name, part in blocks.map(product):
            products[name] += part
        t = self.weights[1] / sum(self.weights)
        shares = {name: slerp_shares(product, t) for name, product in products.items()}

        def combine(block: Block) -> Combined:
            one, two = shares[block.name]
            summed = _summed(block.deltas, _factors((one, two)))
            of_base = np.float32(one + two - 1)
            return summed._replace(merged=summed.merged + of_base * block.base)

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
        density: the share of its entries that each parent keeps, one for all or one for each;
            None: 0.2.
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


def check_factor(name: str, value: float, signed: bool = True) -> None:
    """MergeError for a factor that is neither 0 nor from 1e-6 to 1e6, which float32 multiplies
    without loss; one below zero needs `signed`.
    """
    if value != 0 and not (1e-6 <= abs(value) <= 1e6 and (signed or value > 0)):
        of_size = "of magnitude 1e-6 to 1e6" if signed else "from 1e-6 to 1e6"
        raise MergeError(f"{name}: {value} must be 0, or {of_size}")


def _check_weights(weights: tuple[float, ...], signed: bool = False) -> None:
    """MergeError for a weight that `check_factor` refuses, and where all are 0."""
    for weight in weights:
        check_factor("weights", weight, signed)
    if not any(weights):
        raise MergeError("weights: all are 0, which leaves nothing to merge")


def _check_density(density: tuple[float, ...]) -> None:
    """MergeError for a share outside [1e-6, 1]."""
    for share in density:
        if not 1e-6 <= share <= 1:
            raise MergeError(f"density: {share} must be from 1e-6 to 1")


def _summed(kept: Rows, weights: Float32[np.ndarray, "p"]) -> Combined:
    return Combined(kept, weighted_sum(kept, weights))


def kth_magnitudes(
    blocks: Blocks, counts: Callable[[int], Sequence[int]]
) -> UInt32[np.ndarray, "p"]:
    """The k-th largest magnitude of each parent's whole delta, exactly, as bits.

    Two passes count bits: the upper half of them, then the lower half of those that have the k-th
    entry's upper half. Counts are integers, so the order of blocks changes nothing.

    counts: the number of all entries -> k of each parent.
    """

    def upper(block: Block) -> np.ndarray:
        return histograms(magnitudes(block.deltas) >> _LOW_BITS, _HIGH_BINS)

    high = reduce(np.add, blocks.map(upper))
    wanted = counts(int(high[0].sum()))
    found = [bin_of(row, k) for row, k in zip(high, wanted, strict=True)]
    places = np.array([place for place, _ in found], np.uint32)

    def lower(block: Block) -> np.ndarray:
        rows = zip(magnitudes(block.deltas), places, strict=True)
        return histograms((bits[bits >> _LOW_BITS == at] & _LOW for bits, at in rows), 2**_LOW_BITS)

    low = reduce(np.add, blocks.map(lower))
    rest = [bin_of(row, left)[0] for row, (_, left) in zip(low, found, strict=True)]
    return (places << _LOW_BITS) | np.array(rest, np.uint32)


def routers_from(which: str) -> int | None:
    """`routers_from` of `merge_folders`. Raises MergeError for what is no choice."""
    if which in ("merge", "base"):
        return None if which == "merge" else 0
    if not which.isascii() or not which.isdigit() or int(which) < 1:
        raise MergeError(f"--routers {which}: give merge, base, or a model's number from 1")
    return int(which)


def shard_bytes(gib: float | None) -> int | None:
    """Bytes of a shard. Raises MergeError where it would be no size."""
    if gib is None:
        return None
    if not 2**-20 <= gib <= 2**20:
        raise MergeError(f"--shard-gib {gib}: must be from a KiB (9.6e-7) to a million")
    return int(gib * 2**30)
