"""Units of measurement with their dimensions and factors.

A unit that is not in the table ("apples") is represented by its word.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from importlib.resources import files
from typing import NamedTuple

SCALES = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "quadrillion": 10**15, "dozen": 12, "lakh": 10**5, "crore": 10**7,
}  # fmt: skip
_LETTERS = frozenset(
    str.split("m g s h L l N J W V A K C F t")
)  # units that may directly follow a number
_NO_UNITS = frozenset(
    str.split(
        "or and more less fewer least most than not no wrong false if but to times over under"
        " above below between plus minus because where when is are was"
    )
)
_EXTRA = re.compile(
    r"\b(?:of|the|in total|total|each|away|old|long|wide|tall|high|only|altogether)\b"
)
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_PART = re.compile(
    r"(?P<word>[^\W\d_]+|°[CF]?|%)(?:\s*\^\s*\{?\s*(?P<power>-?\d)\s*\}?|(?P<digit>\d)"
    r"|\s*(?P<suffix>squared|cubed)\b)?|(?P<slash>/)|[ *.'()-]+|(?P<other>.)"
)

Dimensions = tuple[tuple[str, int], ...]


class Unit(NamedTuple):
    """A unit: its factor to base units, and the exponents of the base units."""

    factor: Fraction
    dimensions: Dimensions
    words: frozenset[str] = frozenset()  # words that are not in the table


def _read_table() -> dict[str, Unit]:
    table: dict[str, Unit] = {}
    prefixes: dict[str, list[tuple[str, Fraction]]] = {"": [("", Fraction(1))]}
    for line in files(__package__).joinpath("units.txt").read_text("utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        names, factor, dimensions = (part.strip() for part in line.split("|"))
        if names.startswith("prefix "):
            prefixes.setdefault(dimensions, [("", Fraction(1))])
            prefixes[dimensions].append((names.split()[1], Fraction(factor)))
            continue
        powers = [part.partition("^") for part in dimensions.split()]
        unit = tuple(sorted((name, int(power or 1)) for name, _, power in powers))
        for entry in names.split():
            kind, _, name = entry.rpartition("-")  # "long-" means that long prefixes apply
            for prefix, scale in prefixes[kind]:
                table[prefix + name] = Unit(Fraction(factor) * scale, unit)
    return table


_TABLE = _read_table()


def lookup(word: str) -> Unit | None:
    """Returns the unit with this name, in singular or plural, or None."""
    for name in (word, word.lower(), word.lower().rstrip("s"), word.rstrip("s")):
        if name in _TABLE and (len(name) > 1 or name == word):
            return _TABLE[name]
    return None


def is_letter(word: str) -> bool:
    """Returns whether a single letter may be a unit's symbol."""
    return word in _LETTERS


def is_known(word: str) -> bool:
    """Returns whether a word of more than one letter is a unit's name."""
    return len(word) > 1 and word.lower() not in SCALES and lookup(word) is not None


def read(text: str) -> Unit | None:
    r"""Returns the unit that a text names ("square meters", "km/h", "m^2"), or None."""
    text = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r" \1 ", text)
    text = text.replace(r"\degree", " degree ").replace(r"\cdot", "*").replace(r"\times", "*")
    text = text.replace("\\", " ").replace("%", " percent ")
    text = re.sub(r"\bdegrees?\s+([CF])(?:elsius|ahrenheit)?\b", r"°\1", text)
    text = re.sub(r"\bdegrees?\s+(celsius|fahrenheit)", r"\1", text, flags=re.I)
    unit_text = re.sub(r"(?<=\w)\s*\bper\b\s*", "/", text).strip(" .,;")
    text = _EXTRA.sub(" ", unit_text).strip(" .,;")
    factor, dimensions, words = Fraction(1), Counter[str](), set[str]()
    sign, power = 1, 1
    for mark in _PART.finditer(text):
        if mark["slash"]:
            sign, power = -1, 1
        if mark["other"] or (mark["word"] or "").lower() in _NO_UNITS:
            return None
        if not mark["word"]:
            continue
        word = mark["word"].lower()
        if word in _POWERS:
            power = _POWERS[word]
            continue
        power = int(mark["power"] or mark["digit"] or _POWERS.get(mark["suffix"], power))
        if abs(power) > 6:
            return None
        known = lookup(mark["word"])
        if known is None:
            words.add(word.rstrip("s"))
        else:
            factor *= known.factor ** (sign * power)
            dimensions.update({name: sign * power * n for name, n in known.dimensions})
        power = 1
    if not unit_text:
        return None
    exponents = tuple(sorted((name, n) for name, n in dimensions.items() if n))
    return Unit(factor, exponents, frozenset(words))


def comparable(left: Unit, right: Unit) -> bool:
    """Returns whether amounts in two units can be equal."""
    if left.dimensions != right.dimensions:
        return False
    return left.words <= right.words or right.words <= left.words
