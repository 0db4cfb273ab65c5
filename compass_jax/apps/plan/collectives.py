"""The collectives in a program's HLO text, times the trip counts of the loops around them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from compass_jax.apps.plan.hlo import Op, called, computations, times

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
# Other types have the bits in their name, except f8e4m3fn and similar (8).
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16}
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


class Sent(NamedTuple):
    """One kind of collective: how many run, the bytes that each device sends, and how many run
    beside other work.
    """

    count: float  # type: ignore[assignment]  # hides tuple.count
    bytes: float
    asynchronous: float


def collectives(hlo: str) -> dict[str, Sent]:
    """Returns the collectives of one device in one run of the program, by kind. A loop of unknown
    length counts once: a decode program's bytes are those of one token step and of the code around
    the loop.

    Each of n devices sends (n - 1) / n of the array that is gathered or scattered, twice that in an
    all-reduce (ring), and a whole permuted array. The bytes of a ragged all-to-all depend on the
    data: the count is a share of the smaller of its operand and its result buffer, the most that
    even routing sends.
    """
    programs = computations(hlo)
    runs = times(programs)
    elsewhere = _on_other_threads(programs)
    total = {kind: Sent(0.0, 0.0, 0.0) for kind in KINDS}
    for name, ops in programs.items():
        for op in ops:
            kind = op.kind.removesuffix("-start")
            if kind not in KINDS or not runs[name]:
                continue
            size = _bytes_sent(kind, op)
            if kind == "ragged-all-to-all":
                size = min(size, _operand_size(op, ops) * (1 - 1 / max(1, _group_size(op.rest))))
            # The TPU's compiler fuses all-reduce and slice: a device keeps a part of the sum.
            if name.startswith("all-reduce-scatter"):
                kind, size = "reduce-scatter", size / 2
            overlaps = op.kind.endswith("-start") or name in elsewhere
            so_far, n = total[kind], runs[name]
            total[kind] = Sent(
                so_far.count + n, so_far.bytes + n * size, so_far.asynchronous + n * overlaps
            )
    return {kind: sent for kind, sent in total.items() if sent.count}


def total_bytes(collectives: Iterable[Sent]) -> float:
    """Returns the bytes that a device sends in all of them."""
    return sum(x.bytes for x in collectives)


def _on_other_threads(programs: dict[str, list[Op]]) -> set[str]:
    """Returns the computations that run concurrently, such as those of the SparseCore."""
    names: list[str] = []
    for ops in programs.values():
        for op in ops:
            if op.kind in ("call-start", "async-start"):
                names += called(op, programs)
    reached = set(names)
    while names:
        for op in programs[names.pop()]:
            more = set(called(op, programs)) - reached
            reached |= more
            names += more
    return reached


def _bytes_sent(kind: str, op: Op) -> float:
    sizes = [_size(*shape) for shape in _SHAPE.findall(op.out)]
    largest, total, n = max(sizes, default=0.0), sum(sizes), _group_size(op.rest)
    if kind == "collective-permute":
        return largest
    if n <= 1:
        return 0.0
    if op.kind.endswith("-start") and kind == "all-reduce":
        total = total if not op.out.startswith("((") else total / 2
    share = (n - 1) / n
    if kind == "all-gather":  # a start's type has operands and results
        return largest * share if op.kind.endswith("-start") else total * share
    if kind == "all-reduce":
        return 2 * total * share
    if kind == "reduce-scatter":
        # The result is a device's part of the array; a start's type has the whole operand too.
        return (largest if op.kind.endswith("-start") else total * n) * share
    return total * share


def _operand_size(op: Op, ops: list[Op]) -> float:
    """Returns the bytes of the first operand; infinity if it is not in the computation."""
    first = op.rest.split(",")[0].split(")")[0].strip().lstrip("%")
    operand = next((x for x in ops if x.name == first), None)
    return (
        math.inf
        if operand is None
        else max((_size(*shape) for shape in _SHAPE.findall(operand.out)), default=math.inf)
    )


def _size(dtype: str, dims: str) -> float:
    digits = re.search(r"\d+", dtype)
    bits = _BITS.get(dtype) or (8 if dtype.startswith("f8") else int(digits[0]) if digits else 0)
    return math.prod(int(d) for d in dims.split(",") if d) * bits / 8


def _group_size(attributes: str) -> int:
    """Returns the devices of one group, from `replica_groups=` `[groups,size]<=...`,
    `{{0,1},{2,3}}` or `mesh['x'=4,'y'=2] {'y'}`; 0 without one.
    """
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(match[2])
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return match[1].count(",") + 1
    return 0
