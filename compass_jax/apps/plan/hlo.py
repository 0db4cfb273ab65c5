"""The computations of a program's HLO text, and how often each runs."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{")
# "%fusion.1 = f32[8]{0} fusion(%a, %b), kind=kLoop": name, type, kind, and the rest.
_OP = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|branch_computations|called_computations)"
    r"=(?:\{([^}]*)\}|(%?[\w.\-]+))"
)


class Op(NamedTuple):
    """An operation of a computation."""

    name: str
    kind: str
    out: str  # the result's type
    rest: str  # operands and attributes


def computations(hlo: str) -> dict[str, list[Op]]:
    """Returns the operations of each computation; the entry's name begins with "ENTRY "."""
    all_: dict[str, list[Op]] = {}
    ops: list[Op] | None = None
    for line in hlo.splitlines():
        if line and not line[0].isspace() and (head := _HEAD.match(line)):
            ops = all_.setdefault(("ENTRY " if line.startswith("ENTRY") else "") + head[1], [])
        elif ops is not None and (op := _OP.match(line)):
            ops.append(Op(op[1], op[3], op[2], op[4]))
    return all_


def called(op: Op, programs: dict[str, list[Op]]) -> list[str]:
    """Returns the computations that an operation calls."""
    names = (
        one
        for many, single in _CALLED.findall(op.rest)
        for one in (many or single).replace("%", "").replace(" ", "").split(",")
    )
    return [name for name in names if name in programs]


def times(programs: dict[str, list[Op]], turns: float = 1.0) -> dict[str, float]:
    """Returns how often each computation runs in one run of the entry; the body of a loop of
    unknown length runs `turns` times.
    """
    runs: dict[str, float] = defaultdict(float)

    def visit(name: str, n: float) -> None:
        runs[name] += n
        for op in programs.get(name, []):
            trips = _trips(op, programs, turns) if op.kind == "while" else 1.0
            for one in called(op, programs):
                visit(one, n * trips)

    for name in [x for x in programs if x.startswith("ENTRY ")]:
        visit(name, 1.0)
    return runs


def _trips(loop: Op, programs: dict[str, list[Op]], turns: float) -> float:
    """Returns how often a loop runs: the compiler's trip count, else the bound of a condition that
    only compares a counter from 0 with a constant, else `turns`.
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
    return float(bounds[0]) if plain and counts and len(bounds) == 1 else turns
