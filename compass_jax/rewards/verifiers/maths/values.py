"""Types of answers: parses a text in normalised notation into a typed value.

A text that fits no other type is a text of words. No answer is evaluated here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from compass_jax.base.aliases import Value
from compass_jax.rewards.verifiers.maths import expressions, units
from compass_jax.rewards.verifiers.maths.chains import contradicts
from compass_jax.rewards.verifiers.maths.evaluation import as_fraction, constant, is_real
from compass_jax.rewards.verifiers.maths.expressions import FUNCTIONS, num
from compass_jax.rewards.verifiers.maths.notation import plain_words
from compass_jax.rewards.verifiers.maths.quantities import (
    NUMBERS,
    OPAQUE,
    Quantity,
    compound,
    expression,
    number_in_words,
    quantity,
    unwrapped,
)
from compass_jax.rewards.verifiers.maths.regions import (
    VARIABLE,
    WHOLE_LINE,
    Region,
    Relation,
    chain,
    intersection,
    interval,
    relation,
    union,
)

MAX_ITEMS = 200
MAX_NESTED = 8


@dataclass(frozen=True)
class Text:
    """A value whose written form is compared.

    Args:
        kind: "words"; "formal" (quantifiers, implications, cases); "opaque", a formula outside of
            the grammar (sums, integrals, limits), which is left to Math-Verify; "clock" (hour,
            minute, second, a or p); "date" (year, month, day); "based" (digits, base).
        content: the text, or the fields.
    """

    kind: str
    content: Value


@dataclass(frozen=True)
class Items:
    """Values in order or as a set."""

    # "list" (no brackets), "set", "()" and "[)" and so on, ":" (ratio), "matrix", "row"
    kind: str
    items: tuple[Value, ...]


@dataclass(frozen=True)
class Named:
    """A value with the name on the left of its equals sign."""

    name: str
    value: Value


_OPENING = ("(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil", r"\begin")
_CLOSING = (")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\end")
_TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|.", re.DOTALL)
_SIGNS = re.compile(
    r"\\(?:neq|leq|geq|approx|equiv|in|notin|subset|subseteq|sim|parallel|perp|cong|mapsto|to"
    r"|nmid)(?![A-Za-z])|=|<|>"
)
_EQUALS = ("=", r"\approx")
_INEQUALITIES = {"<": 1, r"\leq": 1, ">": -1, r"\geq": -1}
_WORD_BETWEEN = (
    r"\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
    r"|(?<=\d)or(?=[A-Z])|\\(?:land|lor)(?![A-Za-z])"
)
_SEPARATOR = re.compile(rf",|{_WORD_BETWEEN}")
_CONDITION = "if|for all|for every|such that|where|when|otherwise"
_STATEMENT = re.compile(
    r"\\(?:forall|exists|implies|iff|nexists|mapsto|subset|subseteq|notin|parallel|perp|cong|sim"
    r"|equiv|nmid)(?![A-Za-z])|\\begin\{(?:cases|aligned|align)"
    rf"|\\text\{{[^{{}}]*\b(?:for|{_CONDITION})\b|(?<![A-Za-z])(?:{_CONDITION})(?![A-Za-z])"
)
_EITHER = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_CLOCK = re.compile(
    r"(\d{1,2})(?:\s*:\s*(\d\d))?(?:\s*:\s*(\d\d))?\s*(?:\\text\{)?\s*(?:([ap])\.?\s*m\.?)?\s*\}?",
    re.I,
)
_MONTHS = str.split(
    "january february march april may june july august september october november december"
)
_DATE_WORDS = re.compile(r"on|of|st|nd|rd|th|(?:mon|tues|wednes|thurs|fri|satur|sun)day")
_BASED = re.compile(
    r"\(?\s*(?:\\text\{)?([0-9][0-9A-Fa-f ]*|[A-F][0-9A-F]+)\}?\s*\)?\s*"
    r"(?:_\s*\{?\s*(?:\\text\{)?\s*(\d{1,2}|[a-z]+)\s*\}?\s*\}?|"
    r"(?:\\text\{)?\s*\(?\s*(?:in\s+)?base[\s-]+(\d{1,2}|[a-z]+)\s*\)?\s*\}?)"
)
_MATRIX = re.compile(
    r"\\begin\s*\{(p|b|B||small)(matrix|array)\}\s*(?:\{[lcr|\s]*\})?(.*)\\end\s*\{\1\2\}",
    re.DOTALL,
)
_THOUSANDS = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?:,\d{3})+)(?![\d,]*\d)")
_REMARK = re.compile(
    r"(.*\d.*?)\s*\((?!(?:not|n?or|and|but|also|maybe|perhaps|possibly|if|unless)\b)"
    r"([A-Za-z][a-z ]+)\)"
)
_OR_INTERVALS = re.compile(r"(?<=[)\]])\s*(?:\\text\{\s*or\s*\}|or|\\lor)\s*(?=[(\[])")
_BEFORE_ITEMS = re.compile(
    r"(?:^|[,;=:({\[}]|\\(?:in|cup|cap|setminus|to|gcd|lcm|max|min)|\b(?:or|and|gcd|lcm|max|min)|U)"
    r"\s*$"
)
_AFTER_ITEMS = re.compile(
    r"\s*(?:$|[,;\]}]|\)|\\(?:cup|cap|setminus|text|\}|rangle)|(?:or|and)\b|U)"
)
_ITEM_BRACKETS = ("(", "[", r"\{", r"\langle")
_EMPTY = re.compile(r"no (?:real )?solutions?|empty ?set")
_REALS = re.compile(r"all real(?: number)?s|real numbers|all real x")
_SYMBOL = r"[A-Za-z]\w*(?:_\{?\w+\}?)?"
_NAMES = re.compile(
    rf"\(?\s*{_SYMBOL}(?:\s*[,;]\s*{_SYMBOL})*\s*\)?|[A-Za-z][A-Za-z .]*|"
    r"[A-Za-z][\w{}'^-]*\([^()]*\)"
)


@lru_cache(maxsize=512)
def top_level(text: str) -> dict[int, str]:
    """Returns the tokens outside of all brackets, and the outermost brackets, by position."""
    outside: dict[int, str] = {}
    depth = 0
    for mark in _TOKEN.finditer(text):
        token = mark[0]
        before, depth = depth, max(0, depth + (token in _OPENING) - (token in _CLOSING))
        if not before or not depth:
            outside[mark.start()] = token
    return outside


def split(text: str, marks: re.Pattern | str) -> tuple[list[str], list[str]]:
    """Returns the parts between separators outside of brackets, and the separators."""
    pattern = re.compile(marks) if isinstance(marks, str) else marks
    parts, between, last = [], [], 0
    for mark in pattern.finditer(text):
        if mark.start() in top_level(text) and mark.start() >= last:
            parts.append(text[last : mark.start()])
            between.append(mark[0])
            last = mark.end()
    return [part.strip() for part in [*parts, text[last:]]], between


def read(text: str, depth: int = 0) -> Value:
    """Returns the typed value of a text in normalised notation."""
    text = text.strip()
    if depth > MAX_NESTED:
        return Text("words", text)
    if only := re.fullmatch(r"\\text\{([^{}]*)\}", text):
        text = only[1].strip()
    for reader in _READERS:
        value = reader(text, depth + 1)
        if value is not None:
            return value
    if (value := quantity(text)) is not None:
        return value
    return Text("opaque" if OPAQUE.search(text) else "words", text)


def _without_thousands(text: str) -> str:
    """Returns a text without the separators of thousands.

    In brackets that stand alone a comma is one only before a zero, which begins no item, so (1,100)
    is a point or an interval; not in 5(1,250) or (1,500; 2,500). In braces, as of a fraction, it is
    one unless other items are separated by ", ".
    """
    opened: list[re.Match] = []
    innermost: dict[int, re.Match] = {}
    ends: dict[int, int] = {}
    for mark in _TOKEN.finditer(text):
        if opened:
            innermost[mark.start()] = opened[-1]
        if mark[0] in _OPENING:
            opened.append(mark)
        elif mark[0] in _CLOSING and opened:
            ends[opened.pop().start()] = mark.end()

    def joined(mark: re.Match) -> str:
        bracket, items = innermost.get(mark.start()), False
        if bracket is not None and bracket[0] not in _ITEM_BRACKETS:
            items = ", " in text
        elif bracket is not None and ",0" not in mark[2]:
            start, end = bracket.start(), ends.get(bracket.start(), len(text))
            alone = _BEFORE_ITEMS.search(text[:start]) and _AFTER_ITEMS.match(text[end:])
            items = bool(alone) and ";" not in text[start:end]
        return mark[0] if items else mark[0].replace(",", "")

    return _THOUSANDS.sub(joined, text)


def readings(text: str, reference: bool = False) -> list[Value]:
    """Returns the possible values of a complete answer."""
    values = [read(_without_thousands(text))]
    if values == [Text("words", text)]:  # 2(1,250+x) is a product, no point
        values = [read(_THOUSANDS.sub(lambda mark: mark[0].replace(",", ""), text))]
    # A decimal comma, unless the digits may be thousands (1,000). A reference with one digit after
    # the comma is a list of two numbers.
    comma = re.fullmatch(r"([-+]?\d+),(\d+)(?!,)(.*)", text)
    if comma and (comma[1].lstrip("+-") == "0" or len(comma[2]) in (2, 4, 5, 6) or (
        len(comma[2]) == 1 and not reference)):  # fmt: skip
        values.append(read(f"{comma[1]}.{comma[2]}{comma[3]}"))
    if re.fullmatch(r"[(\[]\s*-\\infty.*\\infty\s*[)\]]", text):  # (1, 2) or (3, 4) may be points
        values.append(read(_OR_INTERVALS.sub(r"\\cup ", text)))
    if (amount := compound(text)) is not None:  # 4 hours, 30 minutes is also a list
        values.append(amount)
    if (number := number_in_words(plain_words(text).split())) is not None:
        values.append(Quantity((num(number),)))
    if remark := _REMARK.fullmatch(text):
        value, number = read(remark[1]), number_in_words(remark[2].split())
        inner = value.value if isinstance(value, Named) else value
        known = constant(inner.nodes[0]) if isinstance(inner, Quantity) else None
        values += [value] if None in (number, known) or known == number else []  # not 5 (six)
    metres = re.fullmatch(r"([-+]?[\d.]+)([A-Za-z])(\^\{?\d\}?)?", text)  # 7m is an amount, or 7*m
    if metres and units.is_letter(metres[2]) and (head := expression(metres[1])):
        values.append(replace(head, unit=units.read(metres[2] + (metres[3] or ""))))
    return values


def _moment(text: str, depth: int) -> Text | None:
    plain = text.strip(" .")
    mark = _CLOCK.fullmatch(plain)
    if mark and (mark[2] or mark[4]) and int(mark[1]) < 25 and int(mark[2] or 0) < 60:
        half = (mark[4] or "").lower()
        hour = int(mark[1]) % 12 if half else int(mark[1])
        return Text("clock", (hour, int(mark[2] or 0), int(mark[3] or 0), half))
    if iso := re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)", plain):
        return Text("date", tuple(map(int, iso.groups())))
    year = month = day = None
    for part in re.findall(r"[a-z]+|\d+|[^\s.,]", unwrapped(plain).casefold()):
        month_of = [n for n, name in enumerate(_MONTHS, 1) if name.startswith(part[:9])]
        if len(part) == 4 and part.isdigit() and year is None:
            year = int(part)
        elif len(part) < 3 and part.isdigit() and day is None:
            day = int(part)
        elif len(part) > 2 and month_of and month is None:
            (month,) = month_of
        elif not _DATE_WORDS.fullmatch(part):
            return None
    return Text("date", (year, month, day)) if month and (year or day) else None


def _statement(text: str, depth: int) -> Text | None:
    return Text("formal", text) if text[:2] != r"\{" and _STATEMENT.search(text) else None


def _set(text: str, depth: int) -> Value:
    if re.fullmatch(r"\\emptyset|\\\{ ?\\\}", text):
        return Items("set", ())
    if not text.startswith("\\") and _EMPTY.fullmatch(plain_words(text)):
        return Items("set", ())
    if _enclosed(text) != (r"\{", r"\}"):
        return None
    inner = text[2:-2].strip()
    parts, _ = split(inner, r"\||:|\\text\{\s*such that\s*\}")
    if len(parts) == 2 and (parts[0].isalpha() or r"\in" in parts[0]):
        return read(parts[1], depth)
    return Items("set", tuple(_items(inner, depth)))


def _enclosed(text: str) -> tuple[str, str]:
    """Returns the brackets around a whole text, or empty texts."""
    tokens = top_level(text)
    if not text or len(tokens) != 2:
        return "", ""
    opening, closing = tokens.values()
    return (opening, closing) if opening in _OPENING and closing in _CLOSING else ("", "")


def _items(text: str, depth: int) -> list[Value]:
    parts, _ = split(text, ";" if ";" in text else ",")
    return [value for part in parts[:MAX_ITEMS] for value in _several(part, depth)]


def _several(part: str, depth: int) -> Sequence[Value]:
    r"""Returns the value of an item, or both values of an item with \pm."""
    value = read(part, depth)
    is_list = isinstance(value, Items) and value.kind == "list"
    return value.items if is_list and _EITHER.search(part) else [value]


def _membership(text: str, depth: int) -> Value:
    parts, _ = split(text, r"\\in(?![A-Za-z])")
    if len(parts) != 2 or split(parts[0], ",")[1] or _SIGNS.search(parts[0]):
        return None
    return Named(_name(parts[0]), read(parts[1], depth))


def _name(text: str) -> str:
    return re.sub(r"[\s{}\\]", "", re.sub(r"\\text\{([^{}]*)\}", r"\1", text))


def _union(text: str, depth: int) -> Value:
    if re.fullmatch(r"\\mathbb\s*\{?\s*R\s*\}?", text) or _REALS.fullmatch(plain_words(text)):
        return WHOLE_LINE
    if mark := re.fullmatch(r"\\mathbb\s*\{?\s*([ZNQC])\s*\}?(.*)", text):
        return Text("formal", f"{mark[1]}{mark[2]}")
    parts, _ = split(text, r"\\setminus|(?<=\\mathbb\{R\})\s*-")
    if len(parts) == 2:
        removed = region_of(read(parts[1], depth))
        line = region_of(read(parts[0], depth))
        if line is None or removed is None or [*map(len, line.alternatives)] != [0]:
            return None
        ends = [one for each in removed.alternatives for one in each]
        if any(one.sign != "=" for one in ends):
            return None
        return Region((tuple(Relation("neq", one.left, one.right) for one in ends),))
    parts, _ = split(text, r"\\cup")
    if len(parts) < 2:
        return None
    regions = [region_of(read(part, depth)) for part in parts]
    known = [region for region in regions if region is not None]
    return union(known) if len(known) == len(regions) else Text("formal", text)


def region_of(value: Value) -> Region | None:
    """Returns a value as a region of the real line, or None if it is not one."""
    if isinstance(value, Region):
        return value
    if isinstance(value, Named):
        return region_of(value.value)
    if not isinstance(value, Items):
        return None
    ends = [item.nodes[0] for item in value.items if isinstance(item, Quantity)]
    if len(ends) != len(value.items):
        return None
    if value.kind == "set":
        return Region(tuple((Relation("=", VARIABLE, end),) for end in ends))
    if value.kind in ("()", "[]", "[)", "(]") and len(ends) == 2:
        known = [end for end in map(constant, ends) if end is not None and is_real(end)]
        low, high = map(as_fraction, known) if len(known) == 2 else (0, 0)
        return None if low > high else interval(ends[0], ends[1], value.kind)  # (5, 2) is a point
    return None


def _list(text: str, depth: int) -> Value:
    parts, marks = split(text, ";")
    if not marks:
        parts, marks = split(text, _SEPARATOR)
    if not marks:
        return None
    named = re.fullmatch(r"\s*([A-Za-z]\w*(?:\s*,\s*[A-Za-z]\w*)+)\s*=\s*([^=]+)", text)
    if named and ";" not in marks:
        names, ends = named[1].split(","), split(named[2], ",")[0]
        if len(names) == len(ends):
            pairs = zip(names, ends)
            return Items("list", tuple(Named(_name(n), read(v, depth)) for n, v in pairs))
    parts = [part for part in parts if part and not re.fullmatch(r"\\text\{\s*\}", part)]
    values: list[Value] = []
    name = ""
    for part in parts[: MAX_ITEMS + 1]:
        if re.search(r"\\in\s*\\mathbb\s*\{?[ZNRQ]", part) and len(parts) > 1:
            continue  # the domain of a parameter
        for value in _several(part, depth):
            if isinstance(value, Named):
                name = value.name
            elif name and isinstance(value, Quantity | Items):  # x = 1, 2
                value = Named(name, value)
            values.append(value)
    if len(values) < 2:
        return values[0] if values else Text("words", "")
    regions = [value for value in values if isinstance(value, Region)]
    if len(regions) == len(values) and len({region.name for region in regions}) == 1:
        has_or = any("or" in mark for mark in marks)
        return union(regions) if has_or else intersection(regions)
    texts = [value.content for value in values if isinstance(value, Text)]
    if any(isinstance(text, str) and len(text.split()) > 3 for text in texts):
        return Text("words", ", ".join(parts))
    return Items("list", tuple(values))


def _either_sign(text: str, depth: int) -> Value:
    r"""Parses a \pm b as a + b and a - b."""
    if not _EITHER.search(text):
        return None
    parts, _ = split(text, "=")
    name, text = (_name(parts[0]), parts[1]) if len(parts) == 2 else ("", text)
    values = []
    for signs in ("+-", "-+"):
        one = re.sub(r"\\pm(?![A-Za-z])", signs[0], text)
        one = re.sub(r"\\mp(?![A-Za-z])", signs[1], one)
        value = read(one.strip().removeprefix("+"), depth)
        values.append(Named(name, value) if name else value)
    return Items("list", tuple(values))


def _related(text: str, depth: int) -> Value:
    parts, signs = split(text, _SIGNS)
    if not signs:
        return None
    if all(sign in _EQUALS for sign in signs):
        return _equation(parts, signs, depth)
    directions = {_INEQUALITIES.get(sign, 0) for sign in signs}
    sides = [VARIABLE] if not parts[0] else []
    sides += [
        nodes[0]
        for part in parts[len(sides) :]
        for nodes in [expressions.readings(part)[:1]]
        if nodes
    ]
    known = len(sides) == len(parts) and (signs == [r"\neq"] or directions in ({1}, {-1}))
    return chain(sides, signs) if known and len(signs) < 3 else Text("formal", text)


def _equation(parts: Sequence[str], signs: Sequence[str], depth: int) -> Value:
    last = len(parts) - 1
    if r"\approx" in signs and signs[0] == "=":
        # x = 2/3 \approx 0.67: the value is the exact one.
        last = signs.index(r"\approx")
    left = parts[0]
    if last > 1:
        left = next((part for part in parts[:last] if _is_name(part)), left)
    # x = 71 = 72 is no value; the sides of \\approx are not compared.
    joined = [quantity(part) if sign == "=" else None for part, sign in zip(parts, [*signs, "="])]
    if len(parts) > 2 and contradicts(joined[: last + 1]):
        return Text("formal", "=".join(parts))
    value = read(parts[last], depth)
    if not left:
        return value
    if _is_name(left):
        return Named(_name(left), value)
    nodes = expressions.readings(left)[:1] + expressions.readings(parts[last])[:1]
    unit = value.unit if isinstance(value, Quantity) else None
    if unit and nodes and expressions.is_constant(nodes[0]):
        return Relation("=", nodes[0], value.nodes[0], unit)
    return relation("=", *nodes) if len(nodes) == 2 else Text("formal", "=".join(parts))


def _is_name(text: str) -> bool:
    """Returns whether the left side of an equation only names its right side."""
    text = re.sub(r"\\text\{([^{}]*)\}", "a", text).strip()
    if _NAMES.fullmatch(text):
        return True
    for part in split(text, ":")[0]:
        kinds = {one.kind for node in expressions.readings(part) for one in node.walk()}
        if "sym" not in kinds or not kinds <= {"sym", "div", "unknown", "mul", *FUNCTIONS}:
            return False
    return True


def _bracketed(text: str, depth: int) -> Value:
    opening, closing = _enclosed(text)
    if opening not in ("(", "[", r"\langle") or closing not in (")", "]", r"\rangle"):
        return None
    inner = text[len(opening) : -len(closing)].strip()
    if inner.startswith(r"\begin{"):
        return read(inner, depth)
    if not split(inner, "[,;]")[1]:
        if opening + closing == "()" and not quantity(text):
            value = read(inner, depth)
            return None if isinstance(value, Text) and value.kind == "words" else value
        return None
    kind = "()" if opening == r"\langle" else opening + closing
    return Items(kind, tuple(_items(inner, depth)))


def _matrix(text: str, depth: int) -> Value:
    mark = _MATRIX.fullmatch(text)
    if mark is None or r"\begin" in mark[3]:
        return None
    rows = [row for row in re.split(r"\\\\", mark[3]) if row.strip()]
    cells = [tuple(read(cell, depth) for cell in row.split("&")) for row in rows[:MAX_ITEMS]]
    return Items("matrix", tuple(Items("row", row) for row in cells))


def _based(text: str, depth: int) -> Text | None:
    mark = _BASED.fullmatch(text)
    if mark is None:
        return None
    name = mark[2] or mark[3]
    base = int(name) if name.isdigit() else NUMBERS.get(name, 0)
    digits = mark[1].replace(" ", "").upper()
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return Text("based", (digits.lstrip("0") or "0", base))


def _ratio(text: str, depth: int) -> Value:
    text = re.sub(r"^(\d+)\s*(?:\\text\{\s*to\s*\}|to)\s*(\d+)$", r"\1:\2", text)
    parts, _ = split(text, ":")
    read_parts = [quantity(part) for part in parts[:7]]
    quantities = [part for part in read_parts if part is not None]
    return Items(":", tuple(quantities)) if 2 <= len(parts) == len(quantities) <= 6 else None


# The first reader that returns a value decides, so their order matters.
_READERS: tuple[Callable[[str, int], Value], ...] = (
    _moment, _statement, _set, _membership, _union, _list, _either_sign, _related, _bracketed,
    _matrix, _based, _ratio,
)  # fmt: skip
