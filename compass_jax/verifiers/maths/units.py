"""Units of measurement: their dimensions and factors.

A unit that this table does not know ("apples") is a dimension of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

PERCENT = "percent"
DEGREE = "degree"

_F = Fraction
# names -> (factor, dimensions); dimensions as exponents of base units
_TABLE: dict[str, tuple[Fraction, dict[str, int]]] = {}
SCALES = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "quadrillion": 10**15, "dozen": 12, "lakh": 10**5, "crore": 10**7,
}  # fmt: skip


def _define(names: str, factor: Fraction | int, **dimensions: int) -> None:
    for name in names.split():
        _TABLE[name] = (Fraction(factor), dimensions)


_PREFIXES = {
    "": _F(1), "k": _F(1000), "c": _F(1, 100), "m": _F(1, 1000), "d": _F(1, 10),
    "μ": _F(1, 10**6), "u": _F(1, 10**6), "n": _F(1, 10**9), "M": _F(10**6), "G": _F(10**9),
}  # fmt: skip
_LONG_PREFIXES = {
    "": _F(1), "kilo": _F(1000), "centi": _F(1, 100), "milli": _F(1, 1000), "deci": _F(1, 10),
    "micro": _F(1, 10**6), "nano": _F(1, 10**9), "mega": _F(10**6), "giga": _F(10**9),
}  # fmt: skip
_METRIC: tuple[tuple[str, str, Fraction, dict[str, int]], ...] = (
    ("m", "meter metre", _F(1), {"m": 1}),
    ("g", "gram gramme", _F(1, 1000), {"kg": 1}),
    ("s", "second sec", _F(1), {"s": 1}),
    ("L l", "liter litre", _F(1, 1000), {"m": 3}),
    ("N", "newton", _F(1), {"kg": 1, "m": 1, "s": -2}),
    ("J", "joule", _F(1), {"kg": 1, "m": 2, "s": -2}),
    ("W", "watt", _F(1), {"kg": 1, "m": 2, "s": -3}),
    ("Pa", "pascal", _F(1), {"kg": 1, "m": -1, "s": -2}),
    ("Hz", "hertz", _F(1), {"s": -1}),
    ("V", "volt", _F(1), {"V": 1}),
    ("A", "ampere amp", _F(1), {"A": 1}),
    ("K", "kelvin", _F(1), {"K": 1}),
    ("mol", "mole", _F(1), {"mol": 1}),
    ("eV", "electronvolt", _F(1), {"eV": 1}),
    ("cal", "calorie", _F(1), {"cal": 1}),
    ("bit", "bit", _F(1), {"bit": 1}),
    ("B", "byte", _F(8), {"bit": 1}),
)
for _short, _long, _factor, _dimensions in _METRIC:
    for _name in _short.split():
        for _prefix, _scale in _PREFIXES.items():
            _TABLE[_prefix + _name] = (_factor * _scale, _dimensions)
    for _name in _long.split():
        for _prefix, _scale in _LONG_PREFIXES.items():
            _TABLE[_prefix + _name] = (_factor * _scale, _dimensions)
_define("min minute", 60, s=1)
_define("h hr hour", 3600, s=1)
_define("day", 86400, s=1)
_define("week", 7 * 86400, s=1)
_define("month", 1, month=1)
_define("year yr", 12, month=1)
_define("decade", 120, month=1)
_define("century centurie", 1200, month=1)
_define("in inch inche", _F(254, 10000), m=1)
_define("ft foot feet", _F(3048, 10000), m=1)
_define("yd yard", _F(9144, 10000), m=1)
_define("mi mile", _F(1609344, 1000), m=1)
_define("lb pounds-mass", _F(45359237, 10**8), kg=1)
_define("oz ounce", _F(45359237, 16 * 10**8), kg=1)
_define("t ton tonne", 1000, kg=1)
_define("ha hectare", 10**4, m=2)
_define("acre", _F(40468564224, 10**7), m=2)
_define("cc", _F(1, 10**6), m=3)
_define("mph", _F(1609344, 3600 * 1000), m=1, s=-1)
_define("kph kmh kmph", _F(1000, 3600), m=1, s=-1)
_define("dollar usd buck", 1, dollar=1)
_define("cent", _F(1, 100), dollar=1)
_define("euro eur", 1, euro=1)
_define("pound gbp quid", 1, pound=1)
_define("yuan rmb cny", 1, yuan=1)
_define("yen jpy", 1, yen=1)
_define("rupee inr r", 1, rupee=1)
_define("degree deg", 1, degree=1)
_define("radian rad", 1, radian=1)
_define("celsius °c", 1, celsius=1)
_define("fahrenheit °f", 1, fahrenheit=1)
_define("ohm", 1, ohm=1)
_define("percent pct percentage %", 1, percent=1)
_define("unit", 1, unit=1)
_LETTERS = frozenset(str.split("m g s h L l N J W V A K C F t"))
_ABBREVIATIONS = frozenset(["in", "min", "cal", "mol", "bit"])
_NO_UNITS = frozenset(
    str.split(
        "or and more less fewer least most than not no wrong false if but to times over under"
        " above below between plus minus because where when is are was"
    )
)
_EXTRA = re.compile(
    r"\b(?:of|the|in total|total|each|away|old|long|wide|tall|high|only|altogether)\b"
)
_WORD = re.compile(r"[^\W\d_]+|°[CF]?|%")
_POWER = re.compile(r"\s*\^\s*\{?\s*(-?\d)\s*\}?|(\d)")


class Unit(NamedTuple):
    """A unit: what one of it is in base units, and their exponents.

    Args:
        words: the words that the table does not know.
    """

    factor: Fraction
    dimensions: tuple[tuple[str, int], ...]
    words: frozenset[str] = frozenset()


def lookup(word: str) -> tuple[Fraction, dict[str, int]] | None:
    """Returns factor and dimensions of a unit's name, in singular or plural, or None."""
    for name in (word, word.lower(), word.lower().rstrip("s"), word.rstrip("s")):
        if len(name) == 1 and name != word:
            continue
        if name in _TABLE:
            return _TABLE[name]
    return None


def is_letter(word: str) -> bool:
    """Returns whether a plain letter may be a unit's symbol."""
    return word in _LETTERS


def is_known(word: str) -> bool:
    """Returns whether a word of more than one letter is a unit's name."""
    return len(word) > 1 and word.lower() not in SCALES and lookup(word) is not None


def read(text: str) -> Unit | None:
    r"""Returns the unit that a text names ("square meters", "km/h", "m^2"); None for none."""
    text = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r" \1 ", text)
    text = text.replace(r"\degree", " degree ").replace(r"\cdot", "*").replace(r"\times", "*")
    text = text.replace("\\", " ").replace("%", " percent ")
    text = re.sub(r"\bdegrees?\s+([CF])(?:elsius|ahrenheit)?\b", r"°\1", text)
    text = re.sub(r"\bdegrees?\s+(celsius|fahrenheit)", r"\1", text, flags=re.I)
    text = re.sub(r"(?<=\w)\s*\bper\b\s*", "/", text)
    text = _EXTRA.sub(" ", text)
    text = text.strip(" .,;")
    if not text or not re.fullmatch(r"[\w\s°^{}/*.()'-]+", text):
        return None
    return _product(text)


def _product(text: str) -> Unit | None:
    factor, dimensions, words = Fraction(1), dict[str, int](), set[str]()
    for side, part in enumerate(text.replace("(", " ").replace(")", " ").split("/")):
        sign = -1 if side else 1
        power, i = 1, 0
        while i < len(part):
            mark = _WORD.match(part, i)
            if mark is None:
                if part[i] not in " *.-'":
                    return None
                i += 1
                continue
            i = mark.end()
            word = mark[0]
            if word.lower() in _NO_UNITS:
                return None
            if word.lower() in ("square", "sq", "cubic", "cu"):
                power = 2 if word.lower().startswith("s") else 3
                continue
            if word.lower() in ("squared", "cubed"):
                continue
            after = _POWER.match(part, i) if part[i : i + 1] in "^{0123456789 " else None
            if after:
                power, i = int(after[1] or after[2]), after.end()
            elif suffix := re.match(r"\s*(squared|cubed)", part[i:]):
                power, i = (2 if suffix[1] == "squared" else 3), i + suffix.end()
            known = lookup(word)
            if known is None:
                words.add(word.lower().rstrip("s"))
                known = (Fraction(1), {})
            if abs(power) > 6:
                return None
            factor *= known[0] ** (sign * power)
            for name, exponent in known[1].items():
                dimensions[name] = dimensions.get(name, 0) + sign * power * exponent
            power = 1
    dimensions.pop("unit", None)
    kept = tuple(sorted((name, n) for name, n in dimensions.items() if n))
    return Unit(factor, kept, frozenset(words))


def comparable(left: Unit, right: Unit) -> bool:
    """Returns whether amounts in two units can be equal."""
    if left.dimensions != right.dimensions:
        return False
    return left.words <= right.words or right.words <= left.words


def dimension_of(unit: Unit) -> Mapping[str, int]:
    """Returns a unit's dimensions as a mapping."""
    return dict(unit.dimensions)
