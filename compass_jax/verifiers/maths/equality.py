"""Whether an answer is the reference, by what kind of value each is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from compass_jax.verifiers.answers import exact
from compass_jax.verifiers.maths import units
from compass_jax.verifiers.maths.expressions import (
    MAX_BITS,
    Node,
    Undefined,
    Unreadable,
    as_fraction,
    close,
    constant,
    equal,
    evaluate,
    is_constant,
    is_real,
    parse,
    proportional,
    renamed,
    variables,
)
from compass_jax.verifiers.maths.notation import normalised, plain_words
from compass_jax.verifiers.maths.values import (
    Based,
    Formal,
    Grid,
    Items,
    Moment,
    Named,
    Opaque,
    Piece,
    Quantity,
    Ratio,
    Region,
    Relation,
    Words,
    is_infinite,
    pieces_of,
    readings,
)

MAX_CHARS = 2_000
FLOAT_DIGITS = 12  # a decimal of so many digits is the print of a float
ROUNDED_DIGITS = 6  # a reference of so many decimals is a rounded value


def same_answer(reference: str, answer: str) -> bool | None:
    """Returns whether `answer` is `reference`; None where only Math-Verify can say."""
    if _squeezed(reference) == _squeezed(answer):
        return True
    plain = exact(reference), exact(answer)
    if plain[0] and plain[1] and (plain[0][0] == plain[1][0] or plain[0][1] == plain[1][1]):
        return plain[0][1] == plain[1][1]
    if len(answer) > MAX_CHARS or len(reference) > MAX_CHARS or _is_deep(answer):
        return False
    wanted, found = normalised(reference), normalised(answer)
    if found and _canonical(wanted) == _canonical(found):
        return True
    if len(found) > 2 * MAX_CHARS:
        return False
    option = re.match(r"\(?([A-Z])[).:]\s+\S", found)
    if option and wanted.strip("()") == option[1]:
        return True
    left, right = readings(wanted, reference=True), readings(found)
    results = [same(a, b) for a in left for b in right]
    if True in results:
        return True
    if (last := _said_last(found)) and not any(isinstance(a, Words) for a in left):
        results += [same(a, b) for a in left for b in readings(last)]
    return True if True in results else None if None in results else False


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _is_deep(text: str) -> bool:
    depth = 0
    for mark in re.findall(r"[\[({{\])}}]", text):
        depth += 1 if mark in "[({" else -1
        if depth > 60:
            return True
    return False


@lru_cache(maxsize=256)
def _canonical(text: str) -> str:
    """Returns a text without what the notation leaves open."""
    text = re.sub(r"\\text\{\s*([^{}]*?)\s*\}", r" \1 ", text)
    text = re.sub(r"(?<=\\)([A-Za-z]+) (?=[^A-Za-z])", r"\1", text)
    return re.sub(r"[\s]+", " ", re.sub(r"\s*([^\w\s\\])\s*", r"\1", text)).strip()


def _said_last(text: str) -> str:
    """Returns X of a sentence that ends with "is X"; empty for another, or one that negates."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    mark = re.fullmatch(r"([A-Za-z].*)\s(?:is|are|equals?|becomes|gives|by)\s+(\S.*)", text)
    if mark is None or re.search(r"\bnot\b|n't\b|\bor\b", text):
        return ""
    return mark[2].strip()


def same(wanted: Any, found: Any) -> bool | None:
    """Returns whether two values are the same; None where only Math-Verify can say."""
    if isinstance(wanted, Words) or isinstance(found, Words):
        return _same_words(wanted, found)
    if isinstance(wanted, Opaque) or isinstance(found, Opaque):
        return _opaque(wanted, found)
    if isinstance(wanted, Formal) or isinstance(found, Formal):
        return _same_formal(wanted, found)
    if isinstance(wanted, Named) or isinstance(found, Named):
        return _same_named(wanted, found)
    for kinds, compare in _COMPARISONS:
        if isinstance(wanted, kinds) and isinstance(found, kinds):
            return compare(wanted, found)
    if isinstance(wanted, Items) or isinstance(found, Items):
        return _same_mixed(wanted, found)
    return _same_across(wanted, found)


def _text_of(value: Any) -> str:
    return value.text if isinstance(value, Words | Formal | Opaque) else ""


def _same_words(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, Items) and isinstance(found, Words):
        return len(wanted.items) == 1 and _same_words(wanted.items[0], found)
    left, right = (_words_of(value) for value in (wanted, found))
    return bool(left) and left == right


_SYNONYMS = {"dne": "does not exist", "impossible": "not possible"}


def _words_of(value: Any) -> str:
    if isinstance(value, Quantity) and len(value.nodes) == 1 and value.unit is None:
        node = value.nodes[0]
        words = plain_words(str(node.parts[0])) if node.kind == "sym" else ""
    else:
        words = plain_words(_text_of(value))
    return _SYNONYMS.get(words, words)


def _opaque(wanted: Any, found: Any) -> bool | None:
    """Returns None where Math-Verify must compare, False where the kinds or sizes differ."""
    kinds = (Quantity, Opaque, Relation, Grid, Named)
    if not isinstance(wanted, kinds) or not isinstance(found, kinds):
        return False
    return False if any(_is_beyond(value) for value in (wanted, found)) else None


def _is_beyond(value: Any) -> bool:
    """Returns whether a number has no value within the bounds that Math-Verify computes."""
    if not isinstance(value, Quantity) or not is_constant(value.nodes[0]):
        return False
    number = constant(value.nodes[0])
    return number is None or as_fraction(number).numerator.bit_length() > MAX_BITS


def _same_formal(wanted: Any, found: Any) -> bool:
    left, right = _text_of(wanted), _text_of(found)
    return bool(left) and _canonical(left).replace(" ", "") == _canonical(right).replace(" ", "")


def _same_named(wanted: Any, found: Any) -> bool | None:
    if isinstance(wanted, Named) and isinstance(found, Named):
        if _base_name(wanted.name) != _base_name(found.name):
            return _same_renamed(wanted, found)
        return same(wanted.value, found.value)
    if isinstance(wanted, Named):
        if isinstance(found, Relation):
            return _same_relation(_as_relation(wanted), found)
        return same(wanted.value, found)
    if isinstance(wanted, Relation):
        return _same_relation(wanted, _as_relation(found))
    return same(wanted, found.value)


def _base_name(name: str) -> str:
    return re.sub(r"^\((.*)\)$", r"\1", name)


def _same_renamed(wanted: Named, found: Named) -> bool | None:
    """Compares f(x) = 2x with f(n) = 2n, and V1:V2 = 3 with V2:V1 = 3 never."""
    names = [re.fullmatch(r"(\w+)\((\w+)\)", name) for name in (wanted.name, found.name)]
    if names[0] is None or names[1] is None or names[0][1] != names[1][1]:
        return False
    value = found.value
    if isinstance(value, Quantity):
        new = {names[1][2]: names[0][2]}
        value = Quantity(tuple(renamed(node, new) for node in value.nodes), value.unit)
    return same(wanted.value, value)


def _as_relation(value: Named) -> Relation | None:
    if not isinstance(value.value, Quantity) or value.value.unit is not None:
        return None
    try:
        return Relation("=", parse(value.name), value.value.nodes[0])
    except Unreadable:
        return None


def _same_quantity(wanted: Quantity, found: Quantity) -> bool:
    if wanted.unit is None or found.unit is None:
        return _same_numbers(wanted, found, _only_unit(wanted, found))
    if _is_angle(wanted.unit) and _is_angle(found.unit) and wanted.unit != found.unit:
        return _same_numbers(_in_radians(wanted), _in_radians(found), None)
    if not units.comparable(wanted.unit, found.unit):
        return False
    if wanted.unit.factor == found.unit.factor:
        return _same_numbers(wanted, found, None)
    return any(
        equal(_times(a, wanted.unit.factor), _times(b, found.unit.factor))
        for a in wanted.nodes
        for b in found.nodes
    )


def _times(node: Node, factor: Fraction) -> Node:
    return Node("mul", (node, Node("num", (factor,))))


def _only_unit(wanted: Quantity, found: Quantity) -> units.Unit | None:
    return wanted.unit if found.unit is None else found.unit


def _is_angle(unit: units.Unit) -> bool:
    return unit.dimensions in ((("degree", 1),), (("radian", 1),))


def _in_radians(value: Quantity) -> Quantity:
    if value.unit is None or value.unit.dimensions == (("radian", 1),):
        return Quantity(value.nodes)
    half = Node("div", (Node("const", ("pi",)), Node("num", (Fraction(180),))))
    return Quantity(tuple(Node("mul", (node, half)) for node in value.nodes))


def _same_numbers(wanted: Quantity, found: Quantity, unit: units.Unit | None) -> bool:
    """Compares the numbers of two quantities of which at most one has a unit."""
    if unit is not None and "compound" in unit.words:
        return False
    if any(equal(a, b) for a in wanted.nodes for b in found.nodes):
        return unit is None or unit.dimensions != (("percent", 1),) or not _is_fraction(wanted)
    if unit is not None and unit.dimensions == (("percent", 1),):
        left, right = (
            Quantity(tuple(_times(n, Fraction(1, 100)) for n in v.nodes)) if v.unit else v
            for v in (wanted, found)
        )
        return any(equal(a, b) for a in left.nodes for b in right.nodes)
    if (
        unit is not None
        and _is_angle(unit)
        and _mentions_pi(wanted if wanted.unit is None else found)
    ):
        return _same_numbers(_in_radians(wanted), _in_radians(found), None)
    return _same_rounded(wanted, found)


def _is_fraction(value: Quantity) -> bool:
    """Returns whether a reference without a unit is a number between -1 and 1, such as 0.5."""
    number = constant(value.nodes[0])
    return value.unit is None and number is not None and is_real(number) and 0 < abs(number) < 1


def _mentions_pi(value: Quantity) -> bool:
    return any(node == Node("const", ("pi",)) for node in value.nodes[0].walk())


def _same_rounded(wanted: Quantity, found: Quantity) -> bool:
    """Compares a decimal that is the print of a float with an exact value."""
    for decimal, precise, enough in (
        (found, wanted, found.significant >= FLOAT_DIGITS),
        (wanted, found, (wanted.decimals or 0) >= ROUNDED_DIGITS),
    ):
        if decimal.decimals is None or precise.decimals is not None or not enough:
            continue
        a, b = constant(decimal.nodes[0]), constant(precise.nodes[0])
        if a is None or b is None or not is_real(b):
            continue
        unit = Fraction(1, 10**decimal.decimals)
        if abs(as_fraction(b) - a) <= unit * Fraction(6, 10):
            return True
    return False


def _same_based(wanted: Based, found: Based) -> bool:
    return wanted == found


def _same_ratio(wanted: Ratio, found: Ratio) -> bool:
    if len(wanted.parts) != len(found.parts):
        return False
    a, b = ([part.nodes[0] for part in value.parts] for value in (wanted, found))
    return all(equal(Node("mul", (a[0], b[i])), Node("mul", (a[i], b[0]))) for i in range(len(a)))


def _same_moment(wanted: Moment, found: Moment) -> bool:
    if wanted.kind != found.kind:
        return False
    if wanted.kind == "date":
        pairs = zip(wanted.fields, found.fields)
        return all(a == b for a, b in pairs)
    (*a, half), (*b, other) = wanted.fields, found.fields
    if half == other:
        return a == b
    if not half or not other:  # 13:00 is 1:00 pm, and 1:00 may be
        full, named, mark = (b, a, half) if half else (a, b, other)
        if full[0] > 12 or full[0] == 0:
            return full == [named[0] + (12 if mark == "p" else 0), *named[1:]]
        return [full[0] % 12, *full[1:]] == named
    return False


def _same_relation(wanted: Relation | None, found: Relation | None) -> bool:
    if wanted is None or found is None or wanted.sign != found.sign:
        return False
    left, right = (_difference(relation) for relation in (wanted, found))
    sign = proportional(left, right)
    return sign > 0 or (sign < 0 and wanted.sign in ("=", "neq"))


def _difference(relation: Relation) -> Node:
    return Node("add", (relation.left, Node("neg", (relation.right,))))


def _same_region(wanted: Region, found: Region) -> bool:
    if wanted.name and found.name and wanted.name != found.name:
        return False
    if wanted.relation and found.relation and _same_relation(wanted.relation, found.relation):
        return True
    return _same_pieces(wanted.pieces, found.pieces)


def _same_pieces(wanted: Sequence[Piece], found: Sequence[Piece]) -> bool:
    left, right = _joined(wanted), _joined(found)
    if len(left) != len(right):
        return False
    return all(
        (a.low_open, a.high_open) == (b.low_open, b.high_open)
        and _same_end(a.low, b.low)
        and _same_end(a.high, b.high)
        for a, b in zip(left, right)
    )


def _same_end(a: Node | None, b: Node | None) -> bool:
    a, b = (None if end is None or is_infinite(end) else end for end in (a, b))
    return a is b if a is None or b is None else equal(a, b)


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Returns intervals in order, those that touch joined, where their ends have values."""
    infinity = float("inf")

    def end(node: Node | None, without: float) -> Any:
        if node is None or is_infinite(node):
            return without
        value = constant(node)
        return value if value is not None and is_real(value) else None

    ends = [(end(p.low, -infinity), end(p.high, infinity), p) for p in pieces]
    if any(low is None or high is None for low, high, _ in ends):
        return list(pieces)
    found: list[tuple[Any, Any, Piece]] = []
    for low, high, piece in sorted(ends, key=lambda e: (_float(e[0]), e[2].low_open)):
        if found:
            _, last_high, last = found[-1]
            touching = _float(low) < _float(last_high) or (
                _equal_ends(low, last_high) and not (piece.low_open and last.high_open)
            )
            if touching:
                if _float(high) > _float(last_high):
                    last = Piece(last.low, piece.high, last.low_open, piece.high_open)
                elif _equal_ends(high, last_high):
                    both = piece.high_open and last.high_open
                    last = Piece(last.low, last.high, last.low_open, both)
                found[-1] = (found[-1][0], max(high, last_high, key=_float), last)
                continue
        found.append((low, high, piece))
    return [piece for _, _, piece in found]


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _equal_ends(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return a is b or (isinstance(a, float) and isinstance(b, float) and a == b)
    return close(a, b)


def _holds_within(relation: Relation, pieces: Sequence[Piece]) -> bool:
    """Returns whether an inequality of one variable holds within the intervals and only there.

    It is tried at their ends, beside them, and at many points elsewhere.
    """
    difference = _difference(relation)
    names = variables(difference)
    ends = [end for piece in pieces for end in (piece.low, piece.high) if end is not None]
    values = [constant(end) for end in ends if not is_infinite(end)]
    if len(names) != 1 or relation.sign == "=" or any(v is None or not is_real(v) for v in values):
        return False
    (name,) = names
    exact = [as_fraction(value) for value in values]
    beside = [value + step for value in exact for step in (Fraction(1, 10**6), -Fraction(1, 10**6))]
    inside = [value for value in exact if value.denominator < 10**6]
    spread = [Fraction(n, 7) + Fraction(1, 13) for n in range(-150, 151)]
    spread += [Fraction(10) ** n * sign for n in range(2, 7) for sign in (1, -1)]
    for value in [*beside, *inside, *spread]:
        holds = _holds(relation.sign, difference, {name: value})
        if holds is not None and holds != any(_contains(piece, value) for piece in pieces):
            return False
    return True


def _holds(sign: str, difference: Node, point: dict[str, Fraction]) -> bool | None:
    try:
        value = evaluate(difference, point, real=True)
    except Undefined:
        return None
    return bool(value != 0 if sign == "neq" else value < 0 if sign == "<" else value <= 0)


def _contains(piece: Piece, value: Fraction) -> bool:
    """Returns whether a number lies in an interval with constant ends."""
    ends = [None if end is None or is_infinite(end) else constant(end)
            for end in (piece.low, piece.high)]  # fmt: skip
    low, high = (None if end is None else as_fraction(end) for end in ends)
    above = low is None or value > low or (value == low and not piece.low_open)
    return above and (high is None or value < high or (value == high and not piece.high_open))


def _same_grid(wanted: Grid, found: Grid) -> bool | None:
    if [len(row) for row in wanted.rows] != [len(row) for row in found.rows]:
        return False
    return _all(
        same(a, b) for left, right in zip(wanted.rows, found.rows) for a, b in zip(left, right)
    )


def _all(results: Any) -> bool | None:
    undecided = False
    for result in results:
        if result is False:
            return False
        undecided |= result is None
    return None if undecided else True


def _same_items(wanted: Items, found: Items) -> bool | None:
    kinds = {wanted.kind, found.kind}
    if kinds == {"set"} or kinds == {"set", "list"}:
        return _as_sets(wanted.items, found.items)
    if kinds == {"list"}:
        if _is_sequence(wanted) or _is_ordered(wanted, found):
            return _in_order(wanted.items, found.items)
        return _as_sets(wanted.items, found.items)
    if "set" in kinds:
        return False
    if wanted.kind != found.kind and not _is_loose(wanted, found):
        return False
    return _in_order(wanted.items, found.items)


def _is_loose(wanted: Items, found: Items) -> bool:
    """Returns whether the brackets do not matter: (1, 3) and 1, 3, or [1, 2, 3] and 1, 2, 3."""
    kinds = {wanted.kind, found.kind}
    if kinds == {"()", "list"}:
        return True
    return kinds <= {"()", "[]", "list"} and len(wanted.items) > 2


def _is_sequence(value: Items) -> bool:
    return any(
        isinstance(item, Words | Opaque | Formal) and "ldots" in item.text for item in value.items
    )


def _is_ordered(wanted: Items, found: Items) -> bool:
    """Returns whether a list names different things and the other gives values alone."""
    for one, other in ((wanted, found), (found, wanted)):
        names = [item.name for item in one.items if isinstance(item, Named)]
        unnamed = not any(isinstance(item, Named) for item in other.items)
        plain = {re.sub(r"_?\d+", "", name) for name in names}
        if names and unnamed and len(plain) == len(one.items):
            return True
    return False


def _in_order(wanted: Sequence[Any], found: Sequence[Any]) -> bool | None:
    if len(wanted) != len(found):
        return False
    return _all(same(a, b) for a, b in zip(wanted, found))


def _as_sets(wanted: Sequence[Any], found: Sequence[Any]) -> bool | None:
    forward = _all(_member(item, found) for item in wanted)
    return _all([forward, *(_member(item, wanted, True) for item in found)])


def _member(item: Any, items: Sequence[Any], swapped: bool = False) -> bool | None:
    results = [same(other, item) if swapped else same(item, other) for other in items]
    return True if True in results else None if None in results else False


def _same_mixed(wanted: Any, found: Any) -> bool | None:
    """Compares a list, tuple, set or interval with a value of another kind."""
    for items, other, swapped in ((wanted, found, False), (found, wanted, True)):
        if not isinstance(items, Items):
            continue
        if isinstance(other, Region):
            pieces = pieces_of(items)
            return pieces is not None and _same_pieces(pieces, other.pieces)
        if isinstance(other, Relation) and (pieces := pieces_of(items)) is not None:
            return _holds_within(other, pieces)
        if isinstance(other, Grid):
            return items.kind != "set" and _same_vector(items, other)
        if items.kind in ("set", "list") and items.items:
            return _all(same(other, x) if swapped else same(x, other) for x in items.items)
    return False


def _same_vector(items: Items, grid: Grid) -> bool | None:
    """Compares (1, 2) with a matrix of one row or column."""
    cells = grid.rows[0] if len(grid.rows) == 1 else tuple(row[0] for row in grid.rows)
    if len(grid.rows) > 1 and any(len(row) != 1 for row in grid.rows):
        return False
    return _in_order(items.items, cells)


def _same_across(wanted: Any, found: Any) -> bool | None:
    if isinstance(wanted, Based) and isinstance(found, Quantity):
        number = constant(found.nodes[0])
        if wanted.base == 10:
            return number == int(wanted.digits)
        return wanted.digits.isdigit() and number == int(wanted.digits) and found.unit is None
    if isinstance(found, Based) and isinstance(wanted, Quantity):
        return found.base == 10 and constant(wanted.nodes[0]) == int(found.digits)
    if isinstance(wanted, Quantity) and isinstance(found, Relation) and found.sign == "=":
        return _last_side(wanted, found)
    for ratio, number in ((wanted, found), (found, wanted)):
        if isinstance(ratio, Ratio) and isinstance(number, Quantity) and len(ratio.parts) == 2:
            over, under = (part.nodes[0] for part in ratio.parts)
            return any(equal(Node("div", (over, under)), node) for node in number.nodes)
    for moment, ratio in ((wanted, found), (found, wanted)):
        if isinstance(moment, Moment) and isinstance(ratio, Ratio) and moment.kind == "clock":
            return _same_ratio(_as_ratio(moment), ratio)
    for region, relation in ((wanted, found), (found, wanted)):
        if isinstance(region, Region) and isinstance(relation, Relation):
            same_one = _same_relation(region.relation, relation)
            return same_one or _holds_within(relation, region.pieces)
    return False


def _as_ratio(value: Moment) -> Ratio:
    numbers = value.fields[: 3 if value.fields[2] else 2]
    return Ratio(tuple(Quantity((Node("num", (Fraction(n),)),)) for n in numbers))


def _last_side(wanted: Quantity, found: Relation) -> bool:
    """Compares the right side of an equation whose left side is not another number."""
    if is_constant(found.left) and not equal(found.left, found.right):
        return False
    return any(equal(node, found.right) for node in wanted.nodes)


_COMPARISONS: tuple[tuple[type, Callable[[Any, Any], bool | None]], ...] = (
    (Quantity, _same_quantity),
    (Based, _same_based),
    (Ratio, _same_ratio),
    (Moment, _same_moment),
    (Relation, _same_relation),
    (Region, _same_region),
    (Grid, _same_grid),
    (Items, _same_items),
)
