"""Some of many questions, each label with its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Labelled(Protocol):
    """What has the label of a source."""

    @property
    def label(self) -> str:
        """Its name in the accuracy table."""


T = TypeVar("T", bound=Labelled)


def at_most(wanted: int, available: Sequence[T]) -> list[T]:
    """The first of each label, in their order: each label has its share of the `wanted`; all where
    there are no more.
    """
    left = _shares(Counter(one.label for one in available), wanted)
    chosen = []
    for one in available:
        if left[one.label] > 0:
            left[one.label] -= 1
            chosen.append(one)
    return chosen


def _shares(available: Counter[str], wanted: int) -> dict[str, int]:
    """Largest-remainder apportionment of `wanted` over labels in proportion to what each has; ties
    go to the earlier label.
    """
    total = sum(available.values())
    wanted = min(wanted, total)
    shares = {label: wanted * count // total for label, count in available.items()}
    by_remainder = sorted(available, key=lambda label: -(wanted * available[label] % total))
    for label in by_remainder[: wanted - sum(shares.values())]:
        shares[label] += 1
    return shares
