"""Chains of equations, such as x = 48 + 24 = 72, whose numbers must agree."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from compass_jax.rewards.verifiers.maths import units
from compass_jax.rewards.verifiers.maths.comparison import equal
from compass_jax.rewards.verifiers.maths.evaluation import as_fraction, constant, is_real
from compass_jax.rewards.verifiers.maths.expressions import Node, is_constant, num
from compass_jax.rewards.verifiers.maths.quantities import Quantity


def contradicts(sides: Sequence[Quantity | None]) -> bool:
    """Returns whether the sides of equations are different numbers, as in x = 71 = 72.

    The last side is the value. A number before it must agree with it, unless a computation does:
    x = 5 + 6 = 7 = 11 is 11. Sides before one with a variable and units that only one of both has
    are not compared, and a decimal may be the other number, rounded.
    """
    known: list[Quantity] = []
    for side in reversed(sides):
        if side is None or not is_constant(side.nodes[0]):
            break
        known.append(side)
    if not known:
        return False
    last = known.pop(0)
    supported = any(not _is_number(side) and _agree(side, last) for side in known)
    return not supported and any(_is_number(side) and not _agree(side, last) for side in known)


def _is_number(side: Quantity) -> bool:
    """Returns whether a side is a number or a fraction, and no computation."""
    return all(node.kind in ("num", "neg", "div") for node in side.nodes[0].walk())


def _agree(left: Quantity, right: Quantity) -> bool:
    if bool(left.unit) != bool(right.unit):
        return True
    if left.unit and right.unit and not units.comparable(left.unit, right.unit):
        return True
    values = [_in_base_units(side) for side in (left, right)]
    if any(equal(a, b) for a in values[0] for b in values[1]):
        return True
    numbers = [constant(nodes[0]) for nodes in values]
    decimals = [side.decimals for side in (left, right) if side.decimals]
    if not decimals or any(x is None or not is_real(x) for x in numbers):
        return False
    factor = max(side.unit.factor if side.unit else 1 for side in (left, right))
    error = abs(as_fraction(numbers[0]) - as_fraction(numbers[1]))
    return error < factor * Fraction(1, 10 ** min(decimals))


def _in_base_units(side: Quantity) -> list[Node]:
    if side.unit is None:
        return list(side.nodes)
    return [Node("mul", (node, num(side.unit.factor))) for node in side.nodes]
