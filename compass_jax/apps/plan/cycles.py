"""The TPU compiler's own estimate of a program's cycles, for loops as often as they run.

A cost model, not a measurement. It has no estimate for kernels (attention, `ragged_dot`), scatters,
gathers on the SparseCore and collectives, which come on top.
"""

from __future__ import annotations

import re

from compass_jax.apps.plan.hlo import Op, called, computations, times
from compass_jax.model.experts.ragged import OVERFLOW

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**60  # the compiler's number for "no estimate" is near 2**63


def estimated_cycles(hlo: str, turns: float = 1.0) -> float:
    """Returns the cycles of one run of a compiled program on one device. Work of experts with more
    rows than a balanced load has is left out. A loop whose length depends on the data counts
    `turns` times: that over tokens in decode, and over the LM head's chunks.
    """
    programs = computations(hlo)
    for branch in _overflows(programs):
        del programs[branch]
    runs = times(programs, turns)
    return sum(runs[name] * _cycles(op) for name, ops in programs.items() for op in ops)


def cycles_per_token(hlo: str, tokens: int) -> float:
    """Returns the cycles of one token of every slot in a decode program, whose loop has `tokens`;
    what runs once in a call is shared by them.
    """
    # Without turns of the token loop, the code around it remains.
    per_call = estimated_cycles(hlo, turns=0.0)
    return estimated_cycles(hlo) - per_call + per_call / tokens


def _overflows(programs: dict[str, list[Op]]) -> set[str]:
    """Returns the branches of conditionals that compute the overflow of experts."""
    conditionals = [op for ops in programs.values() for op in ops if op.kind == "conditional"]
    branches = {branch for op in conditionals for branch in called(op, programs)}
    return {x for x in branches if any(f"/{OVERFLOW}/" in op.rest for op in programs[x])}


def _cycles(op: Op) -> int:
    match = _CYCLES.search(op.rest)
    return int(match[1]) if match and int(match[1]) < _UNKNOWN else 0
