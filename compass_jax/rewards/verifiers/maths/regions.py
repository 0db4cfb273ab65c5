"""Subsets of the real line, compared by the points that they contain.

Intervals, unions of intervals and inequalities have one representation: a disjunction of
conjunctions of relations. Two regions are compared at all ends of their intervals, between the ends
and outside of them. If a relation is not a simple bound of its variable, they are also compared
next to the ends and at about 300 other points.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, pairwise, product

from compass_jax.rewards.verifiers.maths.comparison import equal, points, proportional
from compass_jax.rewards.verifiers.maths.evaluation import (
    Number,
    Undefined,
    as_fraction,
    constant,
    evaluate,
)
from compass_jax.rewards.verifiers.maths.expressions import (
    Node,
    is_constant,
    is_infinite,
    variables,
)
from compass_jax.rewards.verifiers.maths.units import Unit

VARIABLE = Node("sym", ("",))  # the variable of a region without a name
MAX_RELATIONS = 40
_BESIDE = Fraction(1, 10**6)
_ELSEWHERE = [Fraction(n, 7) + Fraction(1, 13) for n in range(-150, 151)]
_ELSEWHERE += [sign * Fraction(10) ** n for n in range(2, 7) for sign in (1, -1)]
_RELATIONS = {"<": ("<", 1), ">": ("<", -1), r"\leq": ("leq", 1), r"\geq": ("leq", -1)}


@dataclass(frozen=True)
class Relation:
    """A relation "=", "neq", "<" or "leq" between two expressions."""

    sign: str
    left: Node
    right: Node
    unit: Unit | None = None  # of the right side: 48 + 24 = 72 clips

    @property
    def difference(self) -> Node:
        """The left side minus the right side."""
        return Node("add", (self.left, Node("neg", (self.right,))))


@dataclass(frozen=True)
class Region:
    """The set of values of a variable for which all relations of at least one alternative hold."""

    alternatives: tuple[tuple[Relation, ...], ...]
    name: str = ""


WHOLE_LINE = Region(((),))


def relation(sign: str, left: Node, right: Node) -> Relation:
    """Returns the relation that a sign such as \\geq states."""
    name, direction = _RELATIONS.get(sign, ("neq" if sign == r"\neq" else "=", 1))
    first, second = (left, right)[::direction]
    return Relation(name, first, second)


def interval(low: Node, high: Node, brackets: str) -> Region:
    """Returns the interval between two ends, which may be infinite."""
    bounds = ((low, VARIABLE, brackets[0] == "("), (VARIABLE, high, brackets[1] == ")"))
    return Region(
        (
            tuple(
                Relation("<" if is_open else "leq", left, right)
                for left, right, is_open in bounds
                if not is_infinite(left) and not is_infinite(right)
            ),
        )
    )


def chain(sides: Sequence[Node], signs: Sequence[str]) -> Region:
    """Returns the region of inequalities such as 0 < x \\leq 1, with its variable's name."""
    # f(x) is bounded like a variable.
    sides = [Node("sym", (repr(side),)) if side.kind == "unknown" else side for side in sides]
    names = set[str]().union(*map(variables, sides)) - {"infty"}
    middle = [side.parts[0] for side in (*sides[1:-1], *sides) if side.kind == "sym"]
    name = names.pop() if len(names) == 1 else middle[0] if middle else ""
    relations = (relation(sign, *pair) for sign, pair in zip(signs, pairwise(sides)))
    finite = [one for one in relations if not is_infinite(one.left) and not is_infinite(one.right)]
    return Region((tuple(finite),), name)


def union(regions: Sequence[Region]) -> Region:
    """Returns the union of regions of one variable."""
    return Region(
        tuple(one for region in regions for one in region.alternatives),
        next((region.name for region in regions if region.name), ""),
    )


def intersection(regions: Sequence[Region]) -> Region:
    """Returns the intersection of regions, or their union if the intersection is empty."""
    combined = union(regions)
    choices = islice(product(*(region.alternatives for region in regions)), MAX_RELATIONS)
    common = Region(tuple(sum(choice, ()) for choice in choices), combined.name)
    empty = not any(_contains(common, point) for point in _tests(common))
    return combined if empty else common


def same_region(left: Region, right: Region) -> bool:
    """Returns whether two regions contain the same points."""
    if [[*map(len, region.alternatives)] for region in (left, right)] == [[1], [1]]:
        one, other = _relations(left, right)
        ratio = proportional(one.difference, other.difference) if one.sign == other.sign else 0
        # A negative factor reverses an inequality, but neither "=" nor "neq".
        if ratio > 0 or (ratio and one.sign in ("=", "neq")):
            return True
    if left.name and right.name and left.name != right.name:
        return False
    if not all(_bounds_its_variable(region) for region in (left, right)):
        return False
    if _are_crowded(_bounds(left, right)):
        return _same_as_written(left, right)
    compared = 0
    for point in _tests(left, right):
        inside = _contains(left, point), _contains(right, point)
        if None not in inside:
            compared += 1
            if inside[0] != inside[1]:
                return False
    return compared > 0


def _bounds(*regions: Region) -> list[Node]:
    """Returns the bounds of regions that have no variable."""
    sides = (x for one in _relations(*regions) for x in (one.left, one.right))
    return [side for side in dict.fromkeys(sides) if is_constant(side)]


def _are_crowded(bounds: Sequence[Node]) -> bool:
    """Returns whether no point can tell two different bounds, or whether a bound is too large."""
    values = [constant(node) for node in bounds]
    if None in values:
        return True
    nearest: dict[Fraction, Node] = {}
    known = zip(bounds, values)
    return any(not equal(node, nearest.setdefault(as_fraction(x), node)) for node, x in known)


def _same_as_written(left: Region, right: Region) -> bool:
    """Returns whether two regions have the same relations in the same order, with equal sides."""
    shapes = [[*map(len, region.alternatives)] for region in (left, right)]
    pairs = zip(_relations(left), _relations(right))
    return shapes[0] == shapes[1] and all(
        a.sign == b.sign and equal(a.left, b.left) and equal(a.right, b.right) for a, b in pairs
    )


def _relations(*regions: Region) -> list[Relation]:
    return [one for region in regions for each in region.alternatives for one in each]


def _bounds_its_variable(region: Region) -> bool:
    relations = _relations(region)
    named = all(region.name in variables(one.difference) for one in relations)
    return named and len(relations) <= MAX_RELATIONS


def _contains(region: Region, point: Mapping[str, Number]) -> bool | None:
    """Returns whether a region contains a point; None if a relation is undefined there."""
    try:
        return any(all(_holds(one, point) for one in each) for each in region.alternatives)
    except Undefined:
        return None


def _holds(one: Relation, point: Mapping[str, Number]) -> bool:
    value = evaluate(one.difference, point, real=True)
    if one.sign in ("=", "neq"):
        return bool(value == 0) == (one.sign == "=")
    return bool(value < 0 if one.sign == "<" else value <= 0)


def _tests(*regions: Region) -> Iterator[dict[str, Number]]:
    """Yields the points at which regions are compared, for some values of other variables."""
    names = {region.name for region in regions}
    nodes = [one.difference for one in _relations(*regions)]
    free = set[str]().union(*map(variables, nodes)) - names
    for parameters in islice(points(*nodes), 3 if free else 1):
        for value in _values(regions, parameters):
            yield {**parameters, **dict.fromkeys(names, value)}


def _values(regions: Sequence[Region], parameters: Mapping[str, Number]) -> list[Number]:
    """Returns the values at which regions are compared, for given values of the other variables."""
    ends: dict[Fraction, Number] = {Fraction(0): Fraction(0)}
    simple = True
    for name, one in ((region.name, one) for region in regions for one in _relations(region)):
        bound, side = sorted((one.left, one.right), key=lambda node: name in variables(node))
        variable = side.parts[0] if side.kind == "abs" else side
        simple &= variable == Node("sym", (name,)) and name not in variables(bound)
        try:
            end = evaluate(bound, parameters, real=True)
        except Undefined:
            continue
        # A bound of |x| has two ends.
        ends |= {as_fraction(end): end, -as_fraction(end): -end}
    exact = sorted(ends)
    values = [*ends.values(), exact[0] - 1, exact[-1] + 1]
    values += [(a + b) / 2 for a, b in pairwise(exact)]
    if not simple:
        values += [end + step for end in exact for step in (_BESIDE, -_BESIDE)] + _ELSEWHERE
    return values
