"""Quantities: parses a text in normalised notation into an expression with or without a unit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from compass_jax.rewards.verifiers.maths import expressions, units
from compass_jax.rewards.verifiers.maths.expressions import FUNCTIONS, Node, num
from compass_jax.rewards.verifiers.maths.units import Unit

OPAQUE = re.compile(
    r"\\(?:sum|prod|int|iint|oint|lim|begin|frac\s*\{\s*d|partial|det|operatorname|bmod|pmod|mod|"
    r"nabla|limsup|liminf|sup|inf|substack|overset|underset|stackrel|Gamma|zeta)(?![A-Za-z])"
)
NUMBERS = {
    word: n
    for n, word in enumerate(
        str.split(
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
            " fifteen sixteen seventeen eighteen nineteen"
        )
    )
}
NUMBERS |= dict(
    zip(str.split("twenty thirty forty fifty sixty seventy eighty ninety"), range(20, 100, 10))
)
_PARTS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5}
_LITERAL = re.compile(r"[-+]?\s*(?:\d+(\.\d*)?|(\.\d+))")
_NUMERIC = re.compile(r"(?:[-+\d.^*/{}() ]|\\(?:times|cdot|frac|pi|sqrt)(?![A-Za-z]))+")
_SHORT_WORDS = frozenset(
    str.split("no on in is it to up of or ok us we he so go me my by at an as if do am be")
)
_AMOUNT = re.compile(
    r"\s*(?:,?\s*(?:and|\\text\{\s*and\s*\})|,)?\s*(\d+(?:\.\d+)?)"
    r"\s*(?:\\text\{\s*([A-Za-z]+)\s*(?:,?\s*and|,)?\s*\}|([A-Za-z]+))"
)
_SCALED = re.compile(
    rf"(.+?)\s*(?:\\text\{{)?\s*\b({'|'.join(units.SCALES)})s?\b(.*)", re.IGNORECASE
)
_CURRENCY = re.compile(
    r"(?:\\text\{\s*([^{}]+?)\s*\}\s*(?=[\d.-])|(USD|EUR|GBP|CNY|RMB|Rs|US)\.?\s*(?=\d))"
)


@dataclass(frozen=True)
class Quantity:
    """An expression with or without a unit."""

    nodes: tuple[Node, ...]  # the readings of the expression
    unit: Unit | None = None
    decimals: int | None = None  # digits after the point of a decimal
    significant: int = 0  # significant digits of a decimal


def unwrapped(text: str) -> str:
    r"""Returns a text without \text around its words."""
    return re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)


def number_in_words(words: Sequence[str]) -> Fraction | None:
    """Returns the number that is spelled out: seven, twenty-five, one half."""
    if words[:1] in (["negative"], ["minus"]):
        positive = number_in_words(words[1:])
        return None if positive is None else -positive
    if not 0 < len(words) < 3 or words[0] not in NUMBERS:
        return None
    first = Fraction(NUMBERS[words[0]])
    if len(words) == 1:
        return first
    if first >= 20 and 0 < NUMBERS.get(words[1], 0) < 10:
        return first + NUMBERS[words[1]]
    part = _PARTS.get(words[1].rstrip("s"))
    return first / part if part and first < 20 else None


def is_wordy(text: str) -> bool:
    """Returns whether a text is prose rather than a formula."""
    bare = re.sub(r"_\s*\{[^{}]*\}|\\[A-Za-z]+", " ", unwrapped(text))
    if bare.strip().lower() in _SHORT_WORDS:
        return True
    alone = not re.search(r"[\d+*/^=()\[\]{}|!<>]", bare)
    for word in re.findall(r"(?<![A-Za-z])[A-Za-z]+(?![A-Za-z])", bare):
        if len(word) < 3 or word in FUNCTIONS or word.isupper():
            continue
        if len(word) <= 7 and re.search("sin|cos|tan|log|ln|sqrt|exp", word):
            continue
        if alone or len(word) > 4 or re.search(rf"(?:^|\s){word}(?:\s|$)", bare):
            return True
    return False


def quantity(text: str) -> Quantity | None:
    """Returns a text as an expression with or without a unit, or None if it is not one."""
    mark = _CURRENCY.match(text)
    if mark and (mark[2] or units.lookup(mark[1].strip("."))):
        name = "" if mark[2] == "US" else (mark[1] or mark[2]).strip(".")
        text = f"{text[mark.end() :]}\\text{{ {name} }}"
    if (amount := _scaled(text) or compound(text)) is not None:
        return amount
    for head, tail in _unit_splits(text):
        unit = units.read(tail)
        if unit is not None and (amount := expression(head)) is not None:
            return replace(amount, unit=unit)
    return expression(text)


def expression(text: str) -> Quantity | None:
    """Returns a text as an expression without a unit, or None if it is not one."""
    if is_wordy(text) or (OPAQUE.search(text) and not re.search(r"\\(?:Gamma|zeta)", text)):
        return None
    nodes = expressions.readings(text)
    if not nodes:
        return None
    literal = _LITERAL.fullmatch(text.strip())
    if literal is None:
        return Quantity(nodes)
    point = len(literal[1] or literal[2] or "") - 1
    digits = re.sub(r"\D", "", text).lstrip("0")
    return Quantity(nodes, None, point if point > 0 else None, len(digits))


def _scaled(text: str) -> Quantity | None:
    """Parses an amount with a scale word: 2 million dollars."""
    mark = _SCALED.fullmatch(text)
    head = expression(mark[1]) if mark else None
    if mark is None or head is None:
        return None
    rest = mark[3].strip().strip("}").replace(r"\text{", " ").strip()
    unit = units.read(rest) if rest else None
    if rest and unit is None:
        return None
    factor = num(units.SCALES[mark[2].lower()])
    return Quantity(tuple(Node("mul", (node, factor)) for node in head.nodes), unit)


def compound(text: str) -> Quantity | None:
    """Parses an amount in several units of one dimension, the largest first: 3 ft 4 in."""
    marks = list(_AMOUNT.finditer(text))
    known = [unit for mark in marks if (unit := units.lookup(mark[2] or mark[3]))]
    if len(marks) < 2 or "".join(mark[0] for mark in marks) != text or len(known) < len(marks):
        return None
    if any(after.factor >= before.factor for before, after in pairwise(known)):
        return None  # 3 m, 5 m
    total = sum(Fraction(mark[1]) * unit.factor for mark, unit in zip(marks, known))
    dimensions = {unit.dimensions for unit in known}
    unit = Unit(Fraction(1), dimensions.pop(), frozenset(("compound",)))
    return None if dimensions else Quantity((num(total),), unit)


def _unit_splits(text: str) -> Iterator[tuple[str, str]]:
    """Yields the divisions of a text into an expression and a unit, longest unit first."""
    start = re.search(r"\\text\{|\\degree", text)
    trigonometry = r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])"
    if start and start.start() and not re.search(trigonometry, text[: start.start()]):
        head, tail = text[: start.start()].strip(), text[start.start() :]
        yield (head[:-1], f"% {tail}") if head.endswith("%") else (head, tail)
    if text.endswith("%"):
        yield text[:-1].strip(), "%"
    marks = re.finditer(r"(?:(?<=[\d)}!])|(?<=\\pi))\s*(?=[A-Za-z°])", text)
    for mark, _ in zip(marks, range(40)):
        head, tail = text[: mark.start()], text[mark.end() :]
        word = re.match(r"[A-Za-z°]+", tail)
        if word is None or re.search(r"\\(?!cdot|times|text|degree)", tail):
            continue
        name = word[0]
        letter = units.is_letter(name) and mark[0] and _NUMERIC.fullmatch(head)
        wordy = len(name) > 2 and name not in FUNCTIONS and name != "pi" and not name.isupper()
        if letter or units.is_known(name) or wordy or name in ("sq", "cu"):
            yield head.strip(), tail
