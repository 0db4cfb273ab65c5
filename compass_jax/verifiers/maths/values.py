"""What an answer is: a typed value, read from a text in normalised notation.

Texts that no type fits are words. Nothing is evaluated here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from compass_jax.verifiers.maths import units
from compass_jax.verifiers.maths.expressions import (
    FUNCTIONS,
    Node,
    Unreadable,
    parse,
    styles_of,
)
from compass_jax.verifiers.maths.notation import group_end, plain_words
from compass_jax.verifiers.maths.units import Unit

MAX_ITEMS = 200
MAX_NESTED = 8


@dataclass(frozen=True)
class Words:
    """A text in words."""

    text: str


@dataclass(frozen=True)
class Formal:
    """A statement that is compared as it is written (quantifiers, implications, cases)."""

    text: str


@dataclass(frozen=True)
class Opaque:
    """A formula outside of the grammar (sums, integrals, limits), left to Math-Verify."""

    text: str


@dataclass(frozen=True)
class Moment:
    """A time of day or a date."""

    kind: str
    fields: tuple[Any, ...]


@dataclass(frozen=True)
class Quantity:
    """An expression with or without a unit.

    Args:
        nodes: the readings of the expression.
        decimals: the digits after the point where it is written as a decimal, else None.
        significant: the significant digits that are written.
    """

    nodes: tuple[Node, ...]
    unit: Unit | None = None
    decimals: int | None = None
    significant: int = 0


@dataclass(frozen=True)
class Based:
    """Digits in a base."""

    digits: str
    base: int


@dataclass(frozen=True)
class Ratio:
    """A ratio a : b : c."""

    parts: tuple[Quantity, ...]


@dataclass(frozen=True)
class Items:
    """Values in order or as a set.

    Args:
        kind: "list" (no brackets), "set", or the brackets, as in "()" and "[)".
    """

    kind: str
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Named:
    """A value with the name that stands left of its equals sign."""

    name: str
    value: Any


@dataclass(frozen=True)
class Relation:
    """An equation or inequality: "=", "neq", "<" or "leq" between two expressions."""

    sign: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Piece:
    """An interval of the real line; an end that is None is infinite."""

    low: Node | None
    high: Node | None
    low_open: bool = True
    high_open: bool = True


@dataclass(frozen=True)
class Region:
    """A union of intervals, perhaps written as inequalities of a variable."""

    pieces: tuple[Piece, ...]
    name: str = ""
    relation: Relation | None = None


@dataclass(frozen=True)
class Grid:
    """A matrix, by rows."""

    rows: tuple[tuple[Any, ...], ...]


_OPENING = {"(": ")", "[": "]", r"\langle": r"\rangle"}
_SIGNS = re.compile(
    r"\\(?:neq|leq|geq|approx|equiv|in|notin|subset|subseteq|sim|parallel|perp|cong|mapsto|to"
    r"|nmid)(?![A-Za-z])|=|<|>"
)
_SEPARATOR = re.compile(
    r"\\text\{\s*,?\s*(and|or)\s*,?\s*\}|(?<![A-Za-z\\])(and|or)(?![A-Za-z])|(?<=\d)(or)(?=[A-Z])"
    r"|\\(land|lor)(?![A-Za-z])"
)
_STATEMENT = re.compile(
    r"\\(?:forall|exists|implies|iff|nexists|mapsto|subset|subseteq|notin|parallel|perp|cong|sim"
    r"|equiv|nmid)(?![A-Za-z])"
    r"|\\begin\{(?:cases|aligned|align)"
    r"|\\text\{[^{}]*\b(?:if|for|such that|where|when|otherwise)\b|"
    r"(?<![A-Za-z])(?:if|for all|for every|such that|where|when|otherwise)(?![A-Za-z])"
)
_OPAQUE = re.compile(
    r"\\(?:sum|prod|int|iint|oint|lim|begin|frac\s*\{\s*d|partial|det|operatorname|bmod|pmod|mod|"
    r"nabla|limsup|liminf|sup|inf|substack|overset|underset|stackrel|Gamma|zeta)(?![A-Za-z])"
)
_EITHER = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_CLOCK = re.compile(
    r"(\d{1,2})\s*:\s*(\d{2})(?:\s*:\s*(\d{2}))?\s*(?:\\text\{)?\s*([ap])?\.?\s*(m)?\.?\s*\}?", re.I
)
_HOUR = re.compile(r"(\d{1,2})\s*(?:\\text\{)?\s*([ap])\.?\s*m\.?\s*\}?", re.I)
_MONTHS = {
    name: n + 1
    for n, name in enumerate(str.split("jan feb mar apr may jun jul aug sep oct nov dec"))
}
_MONTH = r"(jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]*\.?"
_DATES = (
    re.compile(rf"{_MONTH}\s+(?P<d>\d{{1,2}})(?:st|nd|rd|th)?(?:\s*,?\s+(?P<y>\d{{4}}))?", re.I),
    re.compile(
        rf"(?P<d>\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH}(?:\s*,?\s+(?P<y>\d{{4}}))?", re.I
    ),
    re.compile(rf"{_MONTH}\s*,?\s+(?P<y>\d{{4}})", re.I),
    re.compile(r"(?P<y>\d{4})-(?P<m>\d{2})-(?P<d>\d{2})"),
)  # fmt: skip
_WEEKDAY = re.compile(
    r"^\s*(?:on\s+)?(?:mon|tues|wednes|thurs|fri|satur|sun)day\s*,?\s+(?=\S)", re.I
)
_BASE_WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "twelve": 12, "sixteen": 16,
}  # fmt: skip
_BASED = re.compile(
    r"\(?\s*(?:\\text\{)?([0-9][0-9A-Fa-f ]*|[A-F][0-9A-F]+)\}?\s*\)?\s*"
    r"(?:_\s*\{?\s*(?:\\text\{)?\s*(\d{1,2}|[a-z]+)\s*\}?\s*\}?|"
    r"(?:\\text\{)?\s*\(?\s*(?:in\s+)?base[\s-]+(\d{1,2}|[a-z]+)\s*\)?\s*\}?)"
)
_TRIGONOMETRY = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_THOUSANDS = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?:,\d{3})+)(?![\d,]*\d)")
_LITERAL = re.compile(r"[-+]?\s*(?:\d+(\.\d*)?|(\.\d+))")
_NUMERIC = re.compile(r"(?:[-+\d.^*/{}() ]|\\(?:times|cdot|frac|pi|sqrt)(?![A-Za-z]))+")
_SHORT_WORDS = frozenset(
    str.split("no on in is it to up of or ok us we he so go me my by at an as if do am be")
)
_EMPTY = frozenset(
    (
        "no solution",
        "no solutions",
        "no real solution",
        "no real solutions",
        "empty set",
        "emptyset",
    )
)


def top_level(text: str, start: int = 0) -> list[tuple[int, str]]:
    """Returns the positions outside of all brackets, with the token that stands there."""
    found, depth, i = [], 0, start
    while i < len(text):
        if text[i] == "\\":
            command = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL).match(text, i)
            token = command[0] if command else "\\"
        else:
            token = text[i]
        if token in ("(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"):
            if depth == 0:
                found.append((i, token))
            depth += 1
        elif token in (")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"):
            depth = max(0, depth - 1)
            if depth == 0:
                found.append((i, token))
        elif token == r"\begin":
            depth += 1
        elif token == r"\end":
            depth = max(0, depth - 1)
        elif depth == 0:
            found.append((i, token))
        i += len(token)
    return found


def split(text: str, marks: re.Pattern | str) -> tuple[list[str], list[str]]:
    """Returns the parts between separators outside of brackets, and the separators."""
    pattern = re.compile(re.escape(marks)) if isinstance(marks, str) else marks
    outside = {i for i, _ in top_level(text)}
    parts, between, last = [], [], 0
    for mark in pattern.finditer(text):
        if mark.start() in outside and mark.start() >= last:
            parts.append(text[last : mark.start()])
            between.append(mark[0])
            last = mark.end()
    return [part.strip() for part in [*parts, text[last:]]], between


def read(text: str, depth: int = 0) -> Any:
    """Returns the typed value of a text in normalised notation."""
    text = text.strip()
    if depth > MAX_NESTED:
        return Words(text)
    if only := re.fullmatch(r"\\text\{([^{}]*)\}", text):
        text = only[1].strip()
    for reader in (_moment, _statement, _set, _membership, _union, _list, _either_sign, _related,
                   _bracketed, _grid, _based, _ratio, _quantity):  # fmt: skip
        value = reader(text, depth)
        if value is not None:
            return value
    if _OPAQUE.search(text):
        return Opaque(text)
    return Words(text)


_ONES = dict(
    zip(
        str.split(
            "zero one two three four five six seven eight nine ten eleven twelve thirteen"
            " fourteen fifteen sixteen seventeen eighteen nineteen twenty"
        ),
        range(21),
    )
)
_TENS = dict(
    zip(
        str.split("twenty thirty forty fifty sixty seventy eighty ninety"),
        range(20, 100, 10),
    )
)
_PARTS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5}


def _number_in_words(text: str) -> Fraction | None:
    """Returns the number that words name: seven, twenty-five, one half."""
    words = plain_words(text).split()
    if len(words) > 1 and words[0] in ("negative", "minus"):
        positive = _number_in_words(" ".join(words[1:]))
        return None if positive is None else -positive
    if len(words) == 1:
        number = {**_ONES, **_TENS}.get(words[0])
        return None if number is None else Fraction(number)
    if len(words) == 2 and words[0] in _TENS and 0 < _ONES.get(words[1], 0) < 10:
        return Fraction(_TENS[words[0]] + _ONES[words[1]])
    if len(words) == 2 and words[0] in _ONES and words[1].rstrip("s") in _PARTS:
        return Fraction(_ONES[words[0]], _PARTS[words[1].rstrip("s")])
    return None


def readings(text: str, reference: bool = False) -> list[Any]:
    """Returns the values that a whole answer may have."""
    found = [read(_without_thousands(text))]
    comma = re.fullmatch(r"([-+]?\d+),(\d+)(?!,)(.*)", text)
    if comma and (comma[1].lstrip("+-") == "0" or len(comma[2]) in (2, 4, 5, 6) or (
        len(comma[2]) == 1 and not reference)):  # fmt: skip
        found.append(read(f"{comma[1]}.{comma[2]}{comma[3]}"))
    if (number := _number_in_words(text)) is not None:
        found.append(Quantity((Node("num", (number,)),)))
    if said := re.fullmatch(r"(.*\d.*?)\s*\((?!not\b)[A-Za-z][a-z ]+\)", text):
        found.append(read(said[1]))
    if re.search(r"\d[A-Za-z](?:\^\{?\d\}?)?$", text):
        found += [_with_letter_unit(text)] if _with_letter_unit(text) else []
    return found


def _without_thousands(text: str) -> str:
    outside = {i for i, _ in top_level(text)}
    spaced = ", " in text

    def joined(mark: re.Match) -> str:
        if mark.start() not in outside and not spaced:
            return mark[0]
        return mark[1] + mark[2].replace(",", "")

    return _THOUSANDS.sub(joined, text)


def _moment(text: str, depth: int) -> Moment | None:
    plain = text.strip(" .")
    if mark := _HOUR.fullmatch(plain):
        return Moment("clock", (int(mark[1]) % 12, 0, 0, mark[2].lower()))
    mark = _CLOCK.fullmatch(plain)
    if mark and int(mark[1]) < 25 and int(mark[2]) < 60 and bool(mark[4]) == bool(mark[5]):
        half = (mark[4] or "").lower()
        hour = int(mark[1]) % 12 if half else int(mark[1])
        return Moment("clock", (hour, int(mark[2]), int(mark[3] or 0), half))
    plain = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", plain)
    plain = _WEEKDAY.sub("", plain)
    for pattern in _DATES:
        if mark := pattern.fullmatch(plain.strip()):
            given = mark.groupdict()
            month = int(given["m"]) if "m" in given else _MONTHS[mark[1].lower()[:3]] if (
                mark[1].lower()[:3] in _MONTHS) else _MONTHS[mark[2].lower()[:3]]  # fmt: skip
            day = given.get("d")
            year = given.get("y")
            return Moment("date", (int(year) if year else None, month, int(day) if day else None))
    return None


def _statement(text: str, depth: int) -> Formal | None:
    if text.startswith(r"\{"):
        return None
    return Formal(text) if _STATEMENT.search(text) else None


def _set(text: str, depth: int) -> Any:
    if text in (r"\emptyset", r"\{\}", r"\{ \}"):
        return Items("set", ())
    if not text.startswith("\\") and plain_words(text) in _EMPTY:
        return Items("set", ())
    if not text.startswith(r"\{"):
        return None
    ends = [i for i, token in top_level(text) if token == r"\}"]
    if len(ends) != 1 or ends[0] != len(text) - 2:
        return None
    inner = text[2:-2].strip()
    parts, _ = split(inner, re.compile(r"\||:|\\text\{\s*such that\s*\}"))
    if len(parts) == 2 and (parts[0].isalpha() or r"\in" in parts[0]):
        return read(parts[1], depth + 1)
    items = _items(inner, depth)
    return Items("set", tuple(items))


def _items(text: str, depth: int) -> list[Any]:
    mark = ";" if ";" in text else ","
    parts, _ = split(text, mark)
    found: list[Any] = []
    for part in parts[:MAX_ITEMS]:
        value = read(part, depth + 1)
        several = isinstance(value, Items) and value.kind == "list" and _EITHER.search(part)
        found += value.items if several else [value]
    return found


def _membership(text: str, depth: int) -> Any:
    parts, _ = split(text, re.compile(r"\\in(?![A-Za-z])"))
    if len(parts) != 2 or split(parts[0], ",")[1] or _SIGNS.search(parts[0]):
        return None
    value = read(parts[1], depth + 1)
    if isinstance(value, Region):
        return Region(value.pieces, _name(parts[0]), None)
    return Named(_name(parts[0]), value)


def _name(text: str) -> str:
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[\s{}\\]", "", text)


_WHOLE_LINE = Region((Piece(None, None),))


def _union(text: str, depth: int) -> Any:
    if re.fullmatch(r"\\mathbb\s*\{?\s*R\s*\}?", text) or plain_words(text) in (
        "all real numbers", "all reals", "real numbers", "all real x",
    ):  # fmt: skip
        return _WHOLE_LINE
    if mark := re.fullmatch(r"\\mathbb\s*\{?\s*([ZNQC])\s*\}?(.*)", text):
        return Formal(f"{mark[1]}{mark[2]}")
    parts, _ = split(text, re.compile(r"\\setminus|(?<=\\mathbb\{R\})\s*-"))
    if len(parts) == 2:
        return _without(read(parts[0], depth + 1), read(parts[1], depth + 1))
    parts, _ = split(text, re.compile(r"\\cup"))
    if len(parts) < 2:
        return None
    pieces: list[Piece] = []
    for part in parts:
        found = pieces_of(read(part, depth + 1))
        if found is None:
            return Formal(text)
        pieces += found
    return Region(tuple(pieces))


def pieces_of(value: Any) -> list[Piece] | None:
    """Returns the intervals of a value that is a part of the real line, else None."""
    if isinstance(value, Region):
        return list(value.pieces)
    if isinstance(value, Named):
        return pieces_of(value.value)
    if not isinstance(value, Items):
        return None
    ends = [item.nodes[0] for item in value.items if isinstance(item, Quantity)]
    if len(ends) != len(value.items):
        return None
    if value.kind == "set":
        return [Piece(end, end, False, False) for end in ends]
    if value.kind in ("()", "[]", "[)", "(]") and len(ends) == 2:
        low, high = (None if is_infinite(end) else end for end in ends)
        return [Piece(low, high, value.kind[0] == "(" or low is None,
                      value.kind[1] == ")" or high is None)]  # fmt: skip
    return None


def is_infinite(node: Node) -> bool:
    """Returns whether a tree is plus or minus infinity."""
    while node.kind == "neg":
        node = node.parts[0]
    return node == Node("sym", ("infty",))


def _without(whole: Any, removed: Any) -> Any:
    """Returns the real line without points."""
    if whole != _WHOLE_LINE and not (
        isinstance(whole, Items) and pieces_of(whole) == [Piece(None, None)]
    ):
        return None
    points = pieces_of(removed)
    if points is None or any(point.low is None or point.low != point.high for point in points):
        return None
    return Region(tuple(_gaps([point.low for point in points if point.low is not None])))


def _gaps(points: Sequence[Node]) -> list[Piece]:
    from compass_jax.verifiers.maths.expressions import constant

    values = {node: constant(node) for node in points}
    if all(value is not None for value in values.values()):
        points = sorted(values, key=lambda node: float(values[node] or 0))
    ends = [None, *points, None]
    return [Piece(low, high) for low, high in pairwise(ends)]


def _list(text: str, depth: int) -> Any:
    semicolons, _ = split(text, ";")
    if len(semicolons) > 1:
        return _listed(semicolons, [";"] * (len(semicolons) - 1), depth)
    parts, marks = split(text, re.compile(rf",|{_SEPARATOR.pattern}"))
    if len(parts) < 2:
        return None
    named = re.fullmatch(r"\s*([A-Za-z]\w*(?:\s*,\s*[A-Za-z]\w*)+)\s*=\s*([^=]+)", text)
    if named:
        names, values = named[1].split(","), split(named[2], ",")[0]
        if len(names) == len(values):
            return Items(
                "list", tuple(Named(_name(n), read(v, depth + 1)) for n, v in zip(names, values))
            )
    return _listed(parts, marks, depth)


def _listed(parts: Sequence[str], marks: Sequence[str], depth: int) -> Any:
    parts = [part for part in parts if part and not re.fullmatch(r"\\text\{\s*\}", part)]
    found: list[Any] = []
    name = ""
    for part in parts[: MAX_ITEMS + 1]:
        if re.search(r"\\in\s*\\mathbb\s*\{?[ZNRQ]", part) and len(parts) > 1:
            continue  # says what a parameter is
        value = read(part, depth + 1)
        if isinstance(value, Named):
            name = value.name
        elif name and isinstance(value, Quantity | Items):
            value = _carried(name, value)
        several = isinstance(value, Items) and value.kind == "list" and _EITHER.search(part)
        found += value.items if several else [value]
    if len(found) < 2:
        return found[0] if found else Words("")
    if all(isinstance(value, Region) for value in found):
        return _merged(found, any("or" in mark for mark in marks))
    if any(isinstance(value, Words) and len(value.text.split()) > 3 for value in found):
        return Words(", ".join(parts))
    return Items("list", tuple(found))


def _carried(name: str, value: Any) -> Any:
    if isinstance(value, Items) and value.kind == "list":
        return Items("list", tuple(_carried(name, item) for item in value.items))
    return Named(name, value)


def _merged(regions: Sequence[Region], union: bool) -> Region:
    """Returns the union, or for x > 2, x < 5 the interval between."""
    name = regions[0].name
    if not union and len(regions) == 2 and all(len(region.pieces) == 1 for region in regions):
        first, second = (region.pieces[0] for region in regions)
        if first.low is None:
            first, second = second, first
        opposed = first.high is None and second.low is None
        if opposed and first.low and second.high and _below(first.low, second.high):
            between = Piece(first.low, second.high, first.low_open, second.high_open)
            return Region((between,), name)
    return Region(tuple(piece for region in regions for piece in region.pieces), name)


def _below(left: Node, right: Node) -> bool:
    from compass_jax.verifiers.maths.expressions import constant, is_real

    a, b = constant(left), constant(right)
    return a is None or b is None or (is_real(a) and is_real(b) and a <= b)


def _either_sign(text: str, depth: int) -> Any:
    r"""Reads a \pm b as a + b and a - b."""
    if not _EITHER.search(text):
        return None
    parts, _ = split(text, "=")
    name = ""
    if len(parts) == 2:
        name, text = _name(parts[0]), parts[1]
    found = []
    for plus, minus in (("+", "-"), ("-", "+")):
        one = re.sub(r"\\pm(?![A-Za-z])", plus, text)
        one = re.sub(r"\\mp(?![A-Za-z])", minus, one)
        one = re.sub(r"^\s*\+", "", one)
        found.append(read(one, depth + 1))
    items = [Named(name, item) if name else item for item in found]
    return Items("list", tuple(items))


_FLIPPED = {">": "<", r"\geq": "leq", "<": "<", r"\leq": "leq"}


def _related(text: str, depth: int) -> Any:
    parts, signs = split(text, _SIGNS)
    if not signs:
        return None
    if any(sign not in ("=", r"\approx", r"\neq", "<", ">", r"\leq", r"\geq") for sign in signs):
        return Formal(text)
    if all(sign in ("=", r"\approx") for sign in signs):
        return _equation(parts, signs, depth)
    if len(signs) > 2 or (len(signs) == 2 and "=" in signs):
        return Formal(text)
    return _inequality(parts, signs, text)


def _equation(parts: Sequence[str], signs: Sequence[str], depth: int) -> Any:
    last = len(parts) - 1
    if r"\approx" in signs and signs[0] == "=":
        last = list(signs).index(r"\approx")
    left, right = parts[0], parts[last]
    if last > 1:
        left = next((part for part in parts[:last] if is_name(part)), left)
    value = read(right, depth + 1)
    if not left:
        return value
    if is_name(left):
        return Named(_name(left), value)
    nodes = _nodes(left), _nodes(right)
    if nodes[0] and nodes[1]:
        return Relation("=", nodes[0][0], nodes[1][0])
    return Formal("=".join(parts))


_SYMBOL = r"[A-Za-z]\w*(?:_\{?\w+\}?)?"
_NAMES = re.compile(
    rf"\(?\s*{_SYMBOL}(?:\s*[,;]\s*{_SYMBOL})*\s*\)?|[A-Za-z][A-Za-z .]*|"
    r"[A-Za-z][\w{}'^-]*\([^()]*\)"
)


def is_name(text: str) -> bool:
    """Returns whether the left side of an equation only names its right side."""
    text = re.sub(r"\\text\{([^{}]*)\}", "a", text).strip()
    if _NAMES.fullmatch(text):
        return True
    parts, _ = split(text, ":")
    for nodes in map(_nodes, parts):
        kinds = {part.kind for node in nodes for part in node.walk()}
        if "sym" not in kinds or not kinds <= {"sym", "div", "fun", "unknown", "mul"}:
            return False
    return True


def _nodes(text: str) -> tuple[Node, ...]:
    found = []
    for style in styles_of(text):
        try:
            found.append(parse(text, style))
        except Unreadable:
            continue
    return tuple(dict.fromkeys(found))


def _inequality(parts: Sequence[str], signs: Sequence[str], text: str) -> Any:
    if len(signs) == 2:
        return _between(parts, signs, text)
    (sign,) = signs
    left, right = parts
    if not left:
        bound = _nodes(right)
        return _one_sided("", sign, bound[0], None) if bound else Formal(text)
    lefts, rights = _nodes(left), _nodes(right)
    if not lefts or not rights:
        return Formal(text)
    return _compared(sign, lefts[0], rights[0])


def _compared(sign: str, left: Node, right: Node) -> Any:
    from compass_jax.verifiers.maths.expressions import is_constant

    if sign in (">", r"\geq"):
        relation = Relation(_FLIPPED[sign], right, left)
    else:
        relation = Relation({"<": "<", r"\leq": "leq", r"\neq": "neq"}[sign], left, right)
    mirrored = {">": "<", "<": ">", r"\leq": r"\geq", r"\geq": r"\leq", r"\neq": r"\neq"}
    for name, bound, direction in ((left, right, sign), (right, left, mirrored[sign])):
        if not is_constant(bound) and name.kind not in ("sym", "unknown"):
            continue
        if name.kind in ("sym", "unknown"):
            return _one_sided(_shown(name), direction, bound, relation)
        if name.kind == "fun" and name.parts[0] == "abs" and name.parts[1].kind == "sym":
            return _absolute(name.parts[1], direction, bound, relation)
    return relation


def _shown(node: Node) -> str:
    return str(node.parts[0])


def _one_sided(name: str, sign: str, bound: Node, relation: Relation | None) -> Region:
    pieces: tuple[Piece, ...]
    if sign == r"\neq":
        pieces = (Piece(None, bound), Piece(bound, None))
    elif sign in (">", r"\geq"):
        pieces = (Piece(bound, None, sign == ">", True),)
    else:
        pieces = (Piece(None, bound, True, sign == "<"),)
    return Region(pieces, name, relation)


def _absolute(variable: Node, sign: str, bound: Node, relation: Relation) -> Any:
    negative = Node("neg", (bound,))
    if sign in ("<", r"\leq"):
        pieces: tuple[Piece, ...] = (Piece(negative, bound, sign == "<", sign == "<"),)
    elif sign in (">", r"\geq"):
        opened = sign == ">"
        pieces = (Piece(None, negative, True, opened), Piece(bound, None, opened, True))
    else:
        return relation
    return Region(pieces, _shown(variable), relation)


def _between(parts: Sequence[str], signs: Sequence[str], text: str) -> Any:
    nodes = [_nodes(part) for part in parts]
    if not all(nodes) or r"\neq" in signs:
        return Formal(text)
    low, middle, high = (node[0] for node in nodes)
    if all(sign in (">", r"\geq") for sign in signs):
        low, high, signs = high, low, [signs[1].replace(">", "<"), signs[0].replace(">", "<")]
        signs = [sign.replace("geq", "leq") for sign in signs]
    if not all(sign in ("<", r"\leq") for sign in signs):
        return Formal(text)
    opened = [sign == "<" for sign in signs]
    if middle.kind in ("sym", "unknown"):
        return Region((Piece(low, high, *opened),), _shown(middle))
    if middle.kind == "fun" and middle.parts[0] == "abs" and middle.parts[1].kind == "sym":
        low_, high_ = Node("neg", (high,)), Node("neg", (low,))
        pieces = (Piece(low_, high_, opened[1], opened[0]), Piece(low, high, *opened))
        return Region(pieces, _shown(middle.parts[1]))
    return Formal(text)


def _bracketed(text: str, depth: int) -> Any:
    opening = next((mark for mark in _OPENING if text.startswith(mark)), None)
    if opening is None:
        return None
    outside = [(i, token) for i, token in top_level(text)]
    ends = [i for i, token in outside if token in (")", "]", r"\rangle")]
    if len(ends) != 1 or ends[0] + len(_token_at(text, ends[0])) != len(text):
        return None
    closing = _token_at(text, ends[0])
    inner = text[len(opening) : ends[0]].strip()
    if re.match(r"\\begin\{", inner):
        return read(inner, depth + 1)
    if not split(inner, re.compile("[,;]"))[1]:
        if opening == "(" and closing == ")" and not _quantity(text, depth):
            value = read(inner, depth + 1)
            return None if isinstance(value, Words) else value
        return None
    kind = "()" if opening == r"\langle" else opening + closing
    return Items(kind, tuple(_items(inner, depth)))


def _token_at(text: str, i: int) -> str:
    return r"\rangle" if text.startswith(r"\rangle", i) else text[i]


_MATRIX = re.compile(
    r"\\begin\s*\{(p|b|B||small)(matrix|array)\}\s*(?:\{[lcr|\s]*\})?(.*)\\end\s*\{\1\2\}",
    re.DOTALL,
)


def _grid(text: str, depth: int) -> Any:
    mark = _MATRIX.fullmatch(text)
    if mark is None or r"\begin" in mark[3]:
        return None
    rows = [row for row in re.split(r"\\\\", mark[3]) if row.strip()]
    cells = [[read(cell, depth + 1) for cell in row.split("&")] for row in rows[:MAX_ITEMS]]
    return Grid(tuple(tuple(row) for row in cells))


def _based(text: str, depth: int) -> Based | None:
    mark = _BASED.fullmatch(text)
    if mark is None:
        return None
    given = mark[2] or mark[3]
    base = int(given) if given.isdigit() else _BASE_WORDS.get(given, 0)
    digits = mark[1].replace(" ", "").upper()
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return Based(digits.lstrip("0") or "0", base)


def _ratio(text: str, depth: int) -> Ratio | None:
    text = re.sub(r"^(\d+)\s*(?:\\text\{\s*to\s*\}|to)\s*(\d+)$", r"\1:\2", text)
    parts, _ = split(text, ":")
    if not 2 <= len(parts) <= 6:
        return None
    found = [_quantity(part, depth) for part in parts]
    if not all(isinstance(part, Quantity) for part in found):
        return None
    return Ratio(tuple(part for part in found if part is not None))


def is_wordy(text: str) -> bool:
    """Returns whether a text is written in words, rather than a formula."""
    bare = re.sub(r"_\s*\{[^{}]*\}|\\[A-Za-z]+", " ", re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text))
    if bare.strip().lower() in _SHORT_WORDS:
        return True
    alone = not re.search(r"[\d+*/^=()\[\]{}|!<>]", bare)
    for word in re.findall(r"(?<![A-Za-z])[A-Za-z]+(?![A-Za-z])", bare):
        if len(word) < 3 or word in FUNCTIONS or word.isupper():
            continue
        function = any(name in word for name in ("sin", "cos", "tan", "log", "ln", "sqrt", "exp"))
        if function and len(word) <= 7:
            continue
        if alone or re.search(rf"(?:^|\s){word}(?:\s|$)", bare):
            return True
        if len(word) > 4:
            return True
    return False


def _quantity(text: str, depth: int) -> Quantity | None:
    text = _currency_first(text)
    scaled = _scaled(text)
    if scaled is not None:
        return scaled
    compound = _compound(text)
    if compound is not None:
        return compound
    for head, tail in _unit_splits(text):
        unit = units.read(tail)
        if unit is not None and (found := _expression(head)) is not None:
            return Quantity(found.nodes, unit, found.decimals, found.significant)
    return _expression(text)


def _currency_first(text: str) -> str:
    mark = re.match(r"\\text\{\s*([^{}]+?)\s*\}\s*(?=[\d.-])", text)
    plain = re.match(r"(USD|EUR|GBP|CNY|RMB|Rs\.?|US)\s*(?=\d)", text)
    for found, name in ((mark, mark and mark[1]), (plain, plain and plain[1])):
        if found and name and (name == "US" or units.lookup(name.strip("."))):
            return f"{text[found.end() :]}\\text{{ {'' if name == 'US' else name.strip('.')} }}"
    return text


def _expression(text: str) -> Quantity | None:
    if is_wordy(text) or (_OPAQUE.search(text) and not re.search(r"\\(?:Gamma|zeta)", text)):
        return None
    nodes = _nodes(text)
    if not nodes:
        return None
    literal = _LITERAL.fullmatch(text.strip())
    if literal is None:
        return Quantity(nodes)
    point = literal[1] or literal[2]
    digits = re.sub(r"\D", "", text).lstrip("0")
    return Quantity(nodes, None, len(point) - 1 if point and len(point) > 1 else None, len(digits))


def _scaled(text: str) -> Quantity | None:
    mark = re.fullmatch(
        rf"(.*?)\s*(?:\\text\{{)?\s*\b({'|'.join(units.SCALES)})s?\b(.*)", text, re.IGNORECASE
    )
    if mark is None or not mark[1]:
        return None
    head = _expression(mark[1])
    rest = mark[3].strip().strip("}").replace(r"\text{", " ").strip()
    unit = units.read(rest) if rest else None
    if head is None or (rest and unit is None):
        return None
    factor = Node("num", (Fraction(units.SCALES[mark[2].lower()]),))
    return Quantity(tuple(Node("mul", (node, factor)) for node in head.nodes), unit)


_AMOUNT = re.compile(
    r"\s*(?:,|and)?\s*(\d+(?:\.\d+)?)\s*(?:\\text\{\s*([A-Za-z]+)\s*(?:,|and)?\s*\}|([A-Za-z]+)"
    r"|(\\degree)|(')|(\"))"
)


def _compound(text: str) -> Quantity | None:
    """Reads amounts in several units of one dimension: 3 ft 4 in."""
    total, dimensions, i, count = Fraction(0), None, 0, 0
    while i < len(text):
        mark = _AMOUNT.match(text, i)
        if mark is None:
            return None
        known = units.lookup(mark[2] or mark[3] or "")
        if known is None or (dimensions is not None and known[1] != dimensions):
            return None
        total, dimensions, i = total + Fraction(mark[1]) * known[0], known[1], mark.end()
        count += 1
    if count < 2 or dimensions is None:
        return None
    unit = Unit(Fraction(1), tuple(sorted(dimensions.items())), frozenset(("compound",)))
    return Quantity((Node("num", (total,)),), unit)


def _unit_splits(text: str) -> list[tuple[str, str]]:
    """Returns the ways to divide a text into an expression and a unit, the longest unit first."""
    found = []
    start = re.search(r"\\text\{|\\degree", text)
    if start and start.start() and not _TRIGONOMETRY.search(text[: start.start()]):
        head, tail = text[: start.start()].strip(), text[start.start() :]
        percent = head.endswith("%")
        found.append((head[:-1], f"% {tail}") if percent else (head, tail))
    if text.endswith("%"):
        found.append((text[:-1].strip(), "%"))
    for mark in re.finditer(r"(?:(?<=[\d)}!])|(?<=\\pi))\s*(?=[A-Za-z°])", text):
        head, tail = text[: mark.start()], text[mark.end() :]
        word = re.match(r"[A-Za-z°]+", tail)
        if word is None or re.search(r"\\(?!cdot|times|text|degree)", tail):
            continue
        name = word[0]
        letter = units.is_letter(name) and mark[0] and _NUMERIC.fullmatch(head)
        wordy = len(name) > 2 and name not in FUNCTIONS and name != "pi" and not name.isupper()
        if letter or units.is_known(name) or wordy or name in ("sq", "cu"):
            found.append((head.strip(), tail))
        if len(found) > 12:
            break
    return found


def _with_letter_unit(text: str) -> Quantity | None:
    """Reads 7m as an amount."""
    mark = re.fullmatch(r"([-+]?[\d.]+)([A-Za-z])(\^\{?\d\}?)?", text)
    if mark is None or not units.is_letter(mark[2]):
        return None
    unit, head = units.read(mark[2] + (mark[3] or "")), _expression(mark[1])
    return Quantity(head.nodes, unit, head.decimals, head.significant) if unit and head else None


def outer_braces(text: str) -> bool:
    """Returns whether braces enclose the whole text."""
    return text.startswith("{") and group_end(text, 0) == len(text)
