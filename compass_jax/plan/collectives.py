"""The collectives in a program's HLO text, times the trip counts of the loops around them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

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
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{")
_OP = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|branch_computations|called_computations)"
    r"=(?:\{([^}]*)\}|(%?[\w.\-]+))"
)


class Sent(NamedTuple):
    """One kind of collective: how many run, and the bytes that each device sends."""

    count: float  # type: ignore[assignment]  # hides tuple.count
    bytes: float


class _Op(NamedTuple):
    name: str
    kind: str
    out: str  # the result's type
    rest: str  # operands and attributes


def collectives(hlo: str) -> dict[str, Sent]:
    """Returns the collectives of one device in one run of the program, by kind. A loop of unknown
    length counts once: a decode program's bytes are those of one token step and of the code around
    the loop.

    Each of n devices sends (n - 1) / n of what it gathers or scatters, twice that in an all-reduce
    (ring), and all of what it permutes. The bytes of a ragged all-to-all depend on the data: the
    count is a share of the smaller of its operand and its result buffer, the most that even routing
    sends.
    """
    programs = _computations(hlo)
    times = _times(programs)
    counts: dict[str, float] = defaultdict(float)
    sent: dict[str, float] = defaultdict(float)
    for name, ops in programs.items():
        for op in ops:
            kind = op.kind.removesuffix("-start")
            if kind not in KINDS or not times[name]:
                continue
            size = _bytes_sent(kind, op)
            if kind == "ragged-all-to-all":
                size = min(size, _operand_size(op, ops) * (1 - 1 / max(1, _group_size(op.rest))))
            # The TPU's compiler fuses all-reduce and slice: a device keeps a part of the sum.
            if name.startswith("all-reduce-scatter"):
                kind, size = "reduce-scatter", size / 2
            counts[kind] += times[name]
            sent[kind] += times[name] * size
    return {kind: Sent(counts[kind], sent[kind]) for kind in KINDS if counts[kind]}


def total_bytes(collectives: Iterable[Sent]) -> float:
    """Returns the bytes that a device sends in all of them."""
    return sum(x.bytes for x in collectives)


def _computations(hlo: str) -> dict[str, list[_Op]]:
    computations: dict[str, list[_Op]] = {}
    ops: list[_Op] | None = None
    for line in hlo.splitlines():
        if line and not line[0].isspace() and (head := _HEAD.match(line)):
            ops = computations.setdefault(
                ("ENTRY " if line.startswith("ENTRY") else "") + head[1], []
            )
        elif ops is not None and (op := _OP.match(line)):
            ops.append(_Op(op[1], op[3], op[2], op[4]))
    return computations


def _times(programs: dict[str, list[_Op]]) -> dict[str, float]:
    """Returns how often each computation runs in one run of the entry."""
    times: dict[str, float] = defaultdict(float)

    def visit(name: str, n: float) -> None:
        times[name] += n
        for op in programs.get(name, []):
            trips = _trips(op, programs) if op.kind == "while" else 1.0
            for many, single in _CALLED.findall(op.rest):
                for one in (many or single).replace("%", "").replace(" ", "").split(","):
                    if one in programs:
                        visit(one, n * trips)

    for name in [x for x in programs if x.startswith("ENTRY ")]:
        visit(name, 1.0)
    return times


def _trips(loop: _Op, programs: dict[str, list[_Op]]) -> float:
    """Returns how often a loop runs: the compiler's trip count, else the bound of a condition that
    only compares a counter from 0 with a constant.
    """
    if known := _TRIPS.search(loop.rest):
        return float(known[1])
    named = _CONDITION.search(loop.rest)
    condition = programs.get(named[1], []) if named else []
    bounds = [
        int(op.rest.split(")")[0])
        for op in condition
        if op.kind == "constant" and op.out.startswith("s32[]")
    ]
    plain = {op.kind for op in condition} <= {
        "parameter",
        "get-tuple-element",
        "constant",
        "compare",
    }
    counts = any("direction=LT" in op.rest for op in condition)
    return float(bounds[0]) if plain and counts and len(bounds) == 1 else 1.0


def _bytes_sent(kind: str, op: _Op) -> float:
    sizes = [_size(*shape) for shape in _SHAPE.findall(op.out)]
    largest, total, n = max(sizes, default=0.0), sum(sizes), _group_size(op.rest)
    if kind == "collective-permute":
        return largest
    if n <= 1:
        return 0.0
    if op.kind.endswith("-start") and kind == "all-reduce":
        total = total if not op.out.startswith("((") else total / 2
    share = (n - 1) / n
    if kind == "all-gather":  # a start's type has the operands beside the results
        return largest * share if op.kind.endswith("-start") else total * share
    if kind == "all-reduce":
        return 2 * total * share
    if kind == "reduce-scatter":
        return (largest if op.kind.endswith("-start") else total * n) * share
    return total * share


def _operand_size(op: _Op, ops: list[_Op]) -> float:
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
