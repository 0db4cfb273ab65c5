"""Equality of expressions by their values at several points.

At a point, two values are compared exactly if both are rational numbers. Otherwise they are
compared with enough digits to show the smallest number in either expression: pi + 1 / 10^100 is
not pi. Numbers that are too large for that are equal only if their residues are (residues.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from types import MappingProxyType

from compass_jax.rewards.verifiers.maths.evaluation import (
    Number,
    TooLarge,
    Undefined,
    apply,
    distance,
    evaluate,
    is_real,
    precision,
)
from compass_jax.rewards.verifiers.maths.expressions import Node, num, variables
from compass_jax.rewards.verifiers.maths.residues import same_residue

POINTS = 8
FURTHER_POINTS = 40  # of expressions that are real at fewer than 2 of the first points
# odd, so that an integer keeps its parity
_SCALES = (Fraction(1), Fraction(1, 10), Fraction(3), Fraction(21), Fraction(201))
INTEGERS = frozenset("kmn")  # variables that stand for integers
SMALL_BITS = 60  # size up to which 60 digits tell two different values
CLOSE_BITS = 130
MAX_WORK = 2**16  # maximum product of precision in bits and number of operations
_ARITHMETIC = frozenset(("num", "sym", "add", "neg", "mul", "div"))


@lru_cache(maxsize=1024)
def _coordinate(name: str, index: int) -> Fraction:
    digest = hashlib.sha256(f"{index} {name}".encode()).digest()
    if name in INTEGERS:
        # Even and odd numbers alternate, which tells (-1)^n from 1.
        return Fraction(2 + (digest[0] % 12) * 2 + index % 2)
    value = Fraction(digest[0] % 89 + 11, digest[1] % 23 + 17)
    # The first half of the points is positive, for functions that are defined only there.
    return -value if index >= POINTS // 2 and digest[2] % 3 else value


def points(*nodes: Node) -> Iterator[dict[str, Fraction]]:
    """Yields the points at which expressions are compared; one if they have no variables."""
    names = sorted(set[str]().union(*map(variables, nodes)))
    for index in range(POINTS if names else 1):
        yield {name: _coordinate(name, index) for name in names}


def _further_points(*nodes: Node) -> Iterator[dict[str, Fraction]]:
    """Yields points of other magnitudes, half of them positive, such as those where x > 10."""
    names = sorted(set[str]().union(*map(variables, nodes)))
    for index in range(POINTS, POINTS + FURTHER_POINTS if names else POINTS):
        scale = _SCALES[index % len(_SCALES)]
        values = {name: _coordinate(name, index) for name in names}
        for name, value in values.items():
            scaled = value if name in INTEGERS and scale < 1 else value * scale
            values[name] = abs(scaled) if index // len(_SCALES) % 2 else scaled
        yield values


def same_value(
    left: Node, right: Node, point: Mapping[str, Number] = MappingProxyType({}), real: bool = False
) -> bool:
    """Returns whether two expressions are equal at a point. Raises Undefined if either has no
    value. With `real`, every subexpression must have a real value.
    """
    sizes: list[int] = []
    try:
        values = [evaluate(node, point, real, sizes) for node in (left, right)]
        if all(isinstance(value, Fraction) for value in values):
            return bool(values[0] == values[1])
        largest = max(sizes)
        if largest <= SMALL_BITS and not _close(values, CLOSE_BITS):
            return False
        bits = -(4 * largest + 300) // 256 * -256  # rounded up: few tables of the gamma function
        operations = (node.kind not in _ARITHMETIC for x in (left, right) for node in x.walk())
        if bits * sum(operations) <= MAX_WORK:
            with precision(bits):
                values = [evaluate(node, point, real) for node in (left, right)]
                return _close(values, 2 * largest + 230, 2 * largest)
    except TooLarge:
        pass
    return same_residue(bound(left, point), bound(right, point))


def _close(values: Sequence[Number], bits: int, small: int = 2**60) -> bool:
    """Returns whether two values have a relative difference of at most 2^-bits. The difference of
    two values below 2^-small is divided by 2^-small.
    """
    difference, larger = distance(*values)
    return difference <= max(larger, -small) - bits


def bound(node: Node, point: Mapping[str, Number]) -> Node:
    """Returns an expression with the values of a point instead of its variables."""
    if node.kind == "sym":
        return num(point[node.parts[0]])
    parts = (bound(part, point) if isinstance(part, Node) else part for part in node.parts)
    return Node(node.kind, tuple(parts))


def equal(left: Node, right: Node) -> bool:
    """Returns whether two expressions have the same values."""
    agreed = count = 0
    # Without i in either expression, points at which a part is not real are skipped.
    real = all(part != Node("const", ("i",)) for node in (left, right) for part in node.walk())
    for point in chain(points(left, right), _further_points(left, right)):
        if count == POINTS and agreed > 1:
            break
        count += 1
        try:
            if not same_value(left, right, point, real and bool(point)):
                return False
        except TooLarge:
            return False
        except Undefined:
            continue
        agreed += 1
    return agreed >= min(count, 2)


def proportional(left: Node, right: Node) -> int:
    """Returns the sign of the constant ratio of two expressions; 0 if the ratio is not constant."""
    first: tuple[Node, Node] | None = None
    sign = 0  # left(p) right(q) = left(q) right(p) at the first point p and each other point q
    for point in points(left, right):
        sides = bound(left, point), bound(right, point)
        try:
            values = [evaluate(node, {}) for node in sides]
            if not all(values):
                return 0
            if first is None:
                ratio = apply("div", values)
                first, sign = sides, 0 if not is_real(ratio) else 1 if ratio > 0 else -1
            elif not same_value(
                Node("mul", (first[0], sides[1])), Node("mul", (sides[0], first[1]))
            ):
                return 0
        except TooLarge:
            return 0
        except Undefined:
            continue
    return sign
