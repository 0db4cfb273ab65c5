"""Comparison of an answer with the reference, by the type of each value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, chain, product

from compass_jax.base.aliases import Value
from compass_jax.rewards.verifiers.answers import exact
from compass_jax.rewards.verifiers.maths import units
from compass_jax.rewards.verifiers.maths.comparison import equal, proportional
from compass_jax.rewards.verifiers.maths.evaluation import (
    MAX_BITS,
    as_fraction,
    constant,
    is_real,
)
from compass_jax.rewards.verifiers.maths.expressions import (
    DEGREE,
    PI,
    Node,
    Unreadable,
    is_constant,
    num,
    parse,
    renamed,
)
from compass_jax.rewards.verifiers.maths.notation import normalised, plain_words
from compass_jax.rewards.verifiers.maths.quantities import Quantity
from compass_jax.rewards.verifiers.maths.regions import Region, Relation, same_region
from compass_jax.rewards.verifiers.maths.values import (
    Items,
    Named,
    Text,
    readings,
    region_of,
)

MAX_CHARS = 2_000
MAX_BRACKETS = 60
FLOAT_DIGITS = 12  # a decimal of this length is a printed float
DOUBLE_DIGITS = 16  # a decimal of this length has the rounding error of a double
DOUBLE_ERROR = Fraction(1, 2**50)  # relative error of four units in the last place
ROUNDED_DIGITS = 6  # a reference of this length is a rounded value
# Letters whose alphabetical order is that of a point: (x, y), but the line (m, b).
_COORDINATES = ("abc", "pq", "xyz")
_SYNONYMS = {"dne": "does not exist", "impossible": "not possible"}
_PERCENT, _DEGREE, _RADIAN = (((name, 1),) for name in ("percent", "degree", "radian"))


def same_answer(reference: str, answer: str) -> bool | None:
    """Returns whether `answer` equals `reference`; None if Math-Verify must decide."""
    if reference.split() == answer.split():
        return True
    plain = exact(reference), exact(answer)
    if plain[0] and plain[1]:
        if plain[0][1] == plain[1][1]:
            return True
        if plain[0][0] == plain[1][0] and max(len(reference), len(answer)) <= DOUBLE_DIGITS:
            return False
    if len(answer) > MAX_CHARS or len(reference) > MAX_CHARS or _is_deep(answer):
        return False
    gold, text = normalised(reference), normalised(answer)
    if text and _canonical(gold) == _canonical(text):
        return True
    if len(text) > 2 * MAX_CHARS:
        return False
    # The reference is the letter of an option, and the answer adds its text: "B) 12".
    option = re.match(r"\(?([A-Z])[).:]\s+\S", text)
    if option and gold.strip("()") == option[1]:
        return True
    left = readings(gold, reference=True)
    right = readings(text)
    if not any(_is_text(value, "words") for value in left) and (last := _last_value(text)):
        right += readings(last)
    return _any(compare(a, b) for a, b in product(left, right))


def _is_deep(text: str) -> bool:
    marks = re.findall(r"[\[({\])}]", text)
    depths = accumulate(1 if mark in "[({" else -1 for mark in marks)
    return max(depths, default=0) > MAX_BRACKETS


@lru_cache(maxsize=256)
def _canonical(text: str) -> str:
    """Returns a text without meaningless blanks and marks."""
    text = re.sub(r"\\text\{\s*([^{}]*?)\s*\}", r" \1 ", text)
    text = re.sub(r"(?<=\\)([A-Za-z]+) (?=[^A-Za-z])", r"\1", text)
    return re.sub(r"[\s]+", " ", re.sub(r"\s*([^\w\s\\])\s*", r"\1", text)).strip()


def _last_value(text: str) -> str:
    """Returns X for a sentence that ends with "is X"; empty for others and negations."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    mark = re.fullmatch(r"([A-Za-z].*)\s(?:is|are|equals?|becomes|gives|by)\s+(\S.*)", text)
    return mark[2] if mark and not re.search(r"\bnot\b|n't\b|\bor\b", text) else ""


def _any(results: Iterable[bool | None]) -> bool | None:
    """Returns True if any result is, else None if any is None, else False."""
    undecided: bool | None = False
    for result in results:
        if result:
            return True
        undecided = None if result is None else undecided
    return undecided


def _all(results: Iterable[bool | None]) -> bool | None:
    """Returns False if any result is, else None if any is None, else True."""
    opposite = _any(None if result is None else not result for result in results)
    return None if opposite is None else not opposite


def compare(gold: Value, answer: Value) -> bool | None:
    """Returns whether two values are equal; None if Math-Verify must decide."""
    pair = (gold, answer)
    for kind, same_text in (("words", _same_words), ("opaque", _opaque), ("formal", _same_formal)):
        if any(_is_text(value, kind) for value in pair):
            return same_text(gold, answer)
    if any(isinstance(value, Named) for value in pair):
        return _same_named(gold, answer)
    if any(isinstance(value, Region) for value in pair):
        regions = [region_of(value) for value in pair]
        return None not in regions and same_region(*regions)  # type: ignore[arg-type]
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        return _same_quantity(gold, answer)
    if isinstance(gold, Items) and isinstance(answer, Items):
        return _same_items(gold, answer)
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return bool(proportional(gold.difference, answer.difference))
    if all(_is_text(value, "clock") for value in pair):
        return _same_clock(gold.content, answer.content)
    for one, other in (pair, pair[::-1]):
        # A set or list equals a single value if all its items do, such as {5} and 5.
        if isinstance(one, Items) and one.kind in ("set", "list") and one.items:
            return _all(compare(*((x, other) if one is gold else (other, x))) for x in one.items)
        if isinstance(one, Items) and one.kind == ":":
            return _same_ratio(one, other)
        if _is_text(one, "based") and isinstance(other, Quantity):
            return _same_digits(one, other, one is gold)
    if isinstance(gold, Quantity) and isinstance(answer, Relation):
        return _is_last_side(gold, answer)
    return gold == answer


def _is_text(value: Value, kind: str) -> bool:
    return isinstance(value, Text) and value.kind == kind


def _text_of(value: Value) -> str:
    return value.content if isinstance(value, Text) and isinstance(value.content, str) else ""


def _same_words(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Items) and len(gold.items) == 1:
        return _same_words(gold.items[0], answer)
    words = [_words_of(value) for value in (gold, answer)]
    return bool(words[0]) and words[0] == words[1]


def _words_of(value: Value) -> str:
    text = _text_of(value)
    if isinstance(value, Quantity) and value.unit is None and value.nodes[0].kind == "sym":
        text = value.nodes[0].parts[0]
    words = plain_words(text)
    return _SYNONYMS.get(words, words)


def _opaque(gold: Value, answer: Value) -> bool | None:
    """Returns None if Math-Verify must compare the values, False if their types or sizes differ."""
    for value in (v.value if isinstance(v, Named) else v for v in (gold, answer)):
        matrix = isinstance(value, Items) and value.kind == "matrix"
        formula = matrix or _is_text(value, "opaque") or isinstance(value, Quantity | Relation)
        if not formula:
            return False
        if isinstance(value, Quantity) and is_constant(value.nodes[0]):
            number = constant(value.nodes[0])  # Math-Verify cannot compute larger numbers
            if number is None or as_fraction(number).numerator.bit_length() > MAX_BITS:
                return False
    return None


def _same_formal(gold: Value, answer: Value) -> bool:
    left, right = (_canonical(_text_of(value)).replace(" ", "") for value in (gold, answer))
    return bool(left) and left == right


def _same_named(gold: Value, answer: Value) -> bool | None:
    names = [value.name if isinstance(value, Named | Region) else "" for value in (gold, answer)]
    for value, other in ((gold, answer), (answer, gold)):
        assigned = _assignments(value)
        if assigned is not None and isinstance(other, Items) and _has_names(other):
            return _as_sets(assigned, other.items)
    if isinstance(gold, Relation):
        return (relation := _as_relation(answer)) is not None and compare(gold, relation)
    if isinstance(answer, Relation):
        return (relation := _as_relation(gold)) is not None and compare(relation, answer)
    left, right = (v.value if isinstance(v, Named) else v for v in (gold, answer))
    if all(names) and len({re.sub(r"^\((.*)\)$", r"\1", name) for name in names}) > 1:
        functions = [re.fullmatch(r"(\w+)\((\w+)\)", name) for name in names]
        if not functions[0] or not functions[1] or functions[0][1] != functions[1][1]:
            return False
        if isinstance(right, Quantity):  # f(x) = 2x is f(n) = 2n
            new = {functions[1][2]: functions[0][2]}
            right = replace(right, nodes=tuple(renamed(node, new) for node in right.nodes))
    return compare(left, right)


def _assignments(value: Value) -> list[Named] | None:
    """Returns the values of (x, y) = (1, 2) with their names, or None for other values."""
    names = re.fullmatch(r"\((\w+(?:,\w+)+)\)", value.name) if isinstance(value, Named) else None
    if names is None or not isinstance(value.value, Items):
        return None
    pairs = list(zip(names[1].split(","), value.value.items))
    return [Named(*pair) for pair in pairs] if len(pairs) == len(value.value.items) else None


def _has_names(value: Items) -> bool:
    return bool(value.items) and all(isinstance(item, Named) for item in value.items)


def _as_relation(value: Named) -> Relation | None:
    if not isinstance(value.value, Quantity) or value.value.unit is not None:
        return None
    try:
        return Relation("=", parse(value.name), value.value.nodes[0])
    except Unreadable:
        return None


def _same_nodes(gold: Quantity, answer: Quantity) -> bool:
    return any(equal(a, b) for a in gold.nodes for b in answer.nodes)


def _times(value: Quantity, factor: Node) -> Quantity:
    """Returns the number of a quantity, without its unit, multiplied by a factor."""
    return Quantity(tuple(Node("mul", (node, factor)) for node in value.nodes))


def _same_quantity(gold: Quantity, answer: Quantity) -> bool:
    left, right = gold.unit, answer.unit
    if left and right:
        if {left.dimensions, right.dimensions} == {_DEGREE, _RADIAN}:
            return _same_nodes(_in_radians(gold), _in_radians(answer))
        if not units.comparable(left, right):
            return False
        if left.factor != right.factor:
            pairs = ((gold, left), (answer, right))
            return _same_nodes(*(_times(value, num(unit.factor)) for value, unit in pairs))
    elif left or right:
        return _same_numbers(gold, answer, left or right)
    return _same_nodes(gold, answer) or _same_rounded(gold, answer)


def _same_numbers(gold: Quantity, answer: Quantity, unit: Value) -> bool:
    """Compares two quantities, one of which has a unit."""
    if "compound" in unit.words:
        return False
    percent = unit.dimensions == _PERCENT
    if _same_nodes(gold, answer):
        return not percent or gold.unit is not None or not _is_part(gold)
    if percent:
        hundredth = num(Fraction(1, 100))
        return _same_nodes(*(_times(v, hundredth) if v.unit else v for v in (gold, answer)))
    bare = answer if gold.unit else gold
    if unit.dimensions in (_DEGREE, _RADIAN) and any(node == PI for node in bare.nodes[0].walk()):
        return _same_nodes(_in_radians(gold), _in_radians(answer))
    return _same_rounded(gold, answer)


def _in_radians(value: Quantity) -> Quantity:
    in_degrees = value.unit is not None and value.unit.dimensions == _DEGREE
    return _times(value, DEGREE if in_degrees else num(1))


def _is_part(value: Quantity) -> bool:
    """Returns whether the absolute value of a number is between 0 and 1, both excluded."""
    number = constant(value.nodes[0])
    return number is not None and is_real(number) and 0 < abs(number) < 1


def _same_rounded(gold: Quantity, answer: Quantity) -> bool:
    """Compares a decimal that is a printed float with an exact value."""
    for decimal, precise, enough in (
        (answer, gold, answer.significant >= FLOAT_DIGITS),
        (gold, answer, (gold.decimals or 0) >= ROUNDED_DIGITS),
    ):
        decimals = decimal.decimals or 0
        is_double = decimal.significant >= DOUBLE_DIGITS > precise.significant
        is_double &= decimals >= ROUNDED_DIGITS
        rounded = decimals > 0 and precise.decimals is None and enough
        if not is_double and not rounded:
            continue
        a, b = constant(decimal.nodes[0]), constant(precise.nodes[0])
        if a is None or b is None or not is_real(b):
            continue
        error = abs(as_fraction(b) - a)
        if rounded and error <= Fraction(6, 10 ** (decimals + 1)):
            return True
        if is_double and error <= DOUBLE_ERROR * abs(as_fraction(b)):
            return True
    return False


def _same_clock(gold: Sequence[Value], answer: Sequence[Value]) -> bool:
    (*a, half), (*b, other) = gold, answer
    if half == other or (half and other):
        return gold == answer
    full, named, mark = (b, a, half) if half else (a, b, other)
    if 0 < full[0] < 13:  # 1:00 may be 1:00 pm
        return [full[0] % 12, *full[1:]] == named
    return full == [named[0] + (12 if mark == "p" else 0), *named[1:]]


def _same_ratio(ratio: Items, other: Value) -> bool:
    """Compares a : b with a number, or with a value that looks like a time."""
    first, second = (part.nodes[0] for part in ratio.items[:2])
    quotient = Quantity((Node("div", (first, second)),))
    if _is_text(other, "clock") and not other.content[2]:
        other = Quantity((Node("div", tuple(map(num, other.content[:2]))),))
    comparable = isinstance(other, Quantity) and len(ratio.items) == 2
    return comparable and _same_nodes(quotient, other)


def _same_digits(based: Text, number: Quantity, is_reference: bool) -> bool:
    """Compares digits in a base with a number, since an answer may omit the base."""
    value = constant(number.nodes[0])
    digits, base = based.content
    if base != 10 and (not is_reference or not digits.isdigit() or number.unit):
        return False
    return bool(value == int(digits))


def _is_last_side(gold: Quantity, answer: Relation) -> bool:
    """Compares the right side of an equation, unless its left side is another number."""
    if is_constant(answer.left) and not equal(answer.left, answer.right):
        return False
    quantity = Quantity((answer.right,), answer.unit)
    return _same_quantity(gold, quantity) if answer.unit else _same_nodes(gold, quantity)


def _same_items(gold: Items, answer: Items) -> bool | None:
    kinds = {gold.kind, answer.kind}
    vectors = "matrix" in kinds and len(kinds) == 2
    left, right = (_vector(v) if vectors else v.items for v in (gold, answer))
    if _has_names(gold) != _has_names(answer):
        left, right = _by_coordinate(left), _by_coordinate(right)
    if ":" in kinds:
        return kinds == {":"} and _in_proportion(left, right)
    if "set" in kinds and not kinds <= {"set", "list"}:
        return False
    if kinds <= {"set", "list"} and not _is_ordered(gold, answer):
        return _as_sets(left, right)
    loose = vectors or kinds == {"()", "list"}
    loose |= kinds <= {"()", "[]", "list"} and len(left) > 2
    if (gold.kind != answer.kind and not loose) or len(left) != len(right):
        return False
    return _all(compare(a, b) for a, b in zip(left, right))


def _vector(value: Items) -> Sequence[Value]:
    """Returns the entries of a matrix with one row or column, which may be written as a tuple."""
    if value.kind != "matrix":
        return value.items
    if len(value.items) == 1:
        return value.items[0].items
    column = all(len(row.items) == 1 for row in value.items)
    return [row.items[0] for row in value.items] if column else value.items


def _by_coordinate(items: Sequence[Value]) -> Sequence[Value]:
    """Returns the values of y = 3, x = 5 in the order of a point (x, y)."""
    names = [re.fullmatch(r"([a-z])_?(\d*)", x.name) for x in items if isinstance(x, Named)]
    keys = [(mark[1], int(mark[2] or 0)) for mark in names if mark]
    letters = {letter for letter, _ in keys}
    if len(set(keys)) < len(items) or not (
        len(letters) == 1 or any(letters <= set(row) for row in _COORDINATES)
    ):
        return items
    return [item for _, item in sorted(zip(keys, items), key=lambda pair: pair[0])]


def _in_proportion(left: Sequence[Quantity], right: Sequence[Quantity]) -> bool:
    a, b = ([part.nodes[0] for part in parts] for parts in (left, right))
    crossed = ((Node("mul", (a[0], y)), Node("mul", (x, b[0]))) for x, y in zip(a, b))
    return len(a) == len(b) and all(equal(*pair) for pair in crossed)


def _is_ordered(gold: Items, answer: Items) -> bool:
    """Returns whether the order of a list matters: 1, 2, ... or names of different things."""
    if {gold.kind, answer.kind} != {"list"}:
        return False
    if any("ldots" in _text_of(item) for item in gold.items):
        return True
    for one, other in ((gold, answer), (answer, gold)):
        names = {re.sub(r"_?\d+", "", x.name) for x in one.items if isinstance(x, Named)}
        if len(names) == len(one.items) and not any(isinstance(x, Named) for x in other.items):
            return True
    return False


def _as_sets(gold: Sequence[Value], answer: Sequence[Value]) -> bool | None:
    forward = (_any(compare(a, b) for b in answer) for a in gold)
    backward = (_any(compare(a, b) for a in gold) for b in answer)
    return _all(chain(forward, backward))
