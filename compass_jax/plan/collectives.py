"""What a compiled program sends: the collectives of its HLO text, each as often as the loops around
it run.
"""

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
# others: what the name's digits say, f8e4m3fn and its like 8
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
    """One kind of collective: how many run, and the bytes that each device sends in them."""

    count: float  # type: ignore[assignment]  # the tuple's own `count` is not needed
    bytes: float


class _Op(NamedTuple):
    name: str
    kind: str
    out: str  # the result's type
    rest: str  # operands and attributes


def collectives(hlo: str) -> dict[str, Sent]:
    """Per kind, of one device and one run of the program. A loop whose length the compiler does not
    know counts once: a decoding program's bytes are those of one token step, and of what is around
    it.

    A device of n sends (n - 1) / n of what it gathers or scatters, twice that in an all-reduce
    (ring), and what it permutes. What a ragged all-to-all sends depends on the data: counted is a
    share of the smaller of its operand and its room for the result, which is what even routing
    sends at most.
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
            # how the TPU's compiler fuses the two: of the whole sum only a part is kept
            if name.startswith("all-reduce-scatter"):
                kind, size = "reduce-scatter", size / 2
            counts[kind] += times[name]
            sent[kind] += times[name] * size
    return {kind: Sent(counts[kind], sent[kind]) for kind in KINDS if counts[kind]}


def total_bytes(found: Iterable[Sent]) -> float:
    """Bytes that a device sends in all of them."""
    return sum(x.bytes for x in found)


def _computations(hlo: str) -> dict[str, list[_Op]]:
    found: dict[str, list[_Op]] = {}
    here: list[_Op] | None = None
    for line in hlo.splitlines():
        if line and not line[0].isspace() and (head := _HEAD.match(line)):
            here = found.setdefault(("ENTRY " if line.startswith("ENTRY") else "") + head[1], [])
        elif here is not None and (op := _OP.match(line)):
            here.append(_Op(op[1], op[3], op[2], op[4]))
    return found


def _times(programs: dict[str, list[_Op]]) -> dict[str, float]:
    """How often each computation runs in one run of the entry."""
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
    """How often a loop runs: what the compiler wrote, or else the bound of a condition that only
    compares a counter from 0 with a constant.
    """
    if found := _TRIPS.search(loop.rest):
        return float(found[1])
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
    largest, whole, n = max(sizes, default=0.0), sum(sizes), _group_size(op.rest)
    if kind == "collective-permute":
        return largest
    if n <= 1:
        return 0.0
    if op.kind.endswith("-start") and kind == "all-reduce":
        whole = whole if not op.out.startswith("((") else whole / 2
    share = (n - 1) / n
    if kind == "all-gather":  # a start's type has the operands beside the results
        return largest * share if op.kind.endswith("-start") else whole * share
    if kind == "all-reduce":
        return 2 * whole * share
    if kind == "reduce-scatter":
        return (largest if op.kind.endswith("-start") else whole * n) * share
    return whole * share


def _operand_size(op: _Op, ops: list[_Op]) -> float:
    """Bytes of an operation's first operand; what is not in its computation is taken to be as large
    as may be.
    """
    first = op.rest.split(",")[0].split(")")[0].strip().lstrip("%")
    found = next((x for x in ops if x.name == first), None)
    return (
        math.inf
        if found is None
        else max((_size(*shape) for shape in _SHAPE.findall(found.out)), default=math.inf)
    )


def _size(dtype: str, dims: str) -> float:
    digits = re.search(r"\d+", dtype)
    bits = _BITS.get(dtype) or (8 if dtype.startswith("f8") else int(digits[0]) if digits else 0)
    return math.prod(int(d) for d in dims.split(",") if d) * bits / 8


def _group_size(rest: str) -> int:
    """Devices of one group, from `replica_groups=` `[groups,size]<=...`, `{{0,1},{2,3}}` or
    `mesh['x'=4,'y'=2] {'y'}`; 0 where there is none.
    """
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
        return int(found[2])
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return found[1].count(",") + 1
    return 0
