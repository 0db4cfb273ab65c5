"""Expressions: parsed into trees, and compared by their values.

Two expressions are equal where their values agree at several points, exact rational numbers as far
as the operations allow and 60 digits elsewhere. An expression without variables has one value. A
function that has no definition (`f(x)`) has a value that depends on its name and arguments alone.
Sizes are bounded before anything is computed: no answer takes long.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import comb, factorial, gcd, isqrt, lcm
from typing import Any, NamedTuple

from compass_jax.errors import CompassError

MAX_NODES = 600
MAX_DEPTH = 60
MAX_DIGITS = 4_000  # of a number that is written
MAX_BITS = 100_000  # of an exact number
MAX_MAGNITUDE = 2**40  # of a number's binary exponent
MAX_FACTORIAL = 5_000  # exact up to here
DIGITS = 60
POINTS = 8
INTEGERS = frozenset("kmn")  # variables that stand for integers

Number = Any  # Fraction, mpmath.mpf or mpmath.mpc

_CONSTANTS = {"pi": "pi", "e": "e", "i": "i"}
FUNCTIONS = frozenset(
    str.split(
        "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth ln log lg"
        " exp sqrt cbrt abs max min gcd lcm floor ceil sgn arcsinh arccosh arctanh"
    )
)
_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "Abs": "abs", "sign": "sgn"}
_GREEK = str.split(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma"
    " tau upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
    " hbar nabla"
)
_WORDS = sorted([*FUNCTIONS, *_ALIASES, "pi", *_GREEK], key=len, reverse=True)
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)|\\(?P<command>[A-Za-z]+)|(?P<escaped>\\[{}|])|(?P<word>"
    + "|".join(word for word in _WORDS if word not in ("nu", "mu", "xi", "eta", "chi", "rho"))
    + r")(?![a-z])|(?P<label>[A-Z]{2,}'*)|(?P<letter>[^\W\d_]'*)|(?P<mark>\S))"
)
_MIXED = re.compile(r"#/#|frac\{#\}\{#\}|frac#")
_ACCENTS = frozenset(
    str.split("overline bar vec hat tilde widehat overrightarrow dot ddot angle triangle")
)
_UNKNOWN = frozenset("fghFGHPpQqRrWTL")  # letters that name a function where "(" follows


class Unreadable(CompassError, ValueError):
    """The text is no expression of this grammar."""


class Undefined(CompassError, ArithmeticError):
    """An expression has no value at a point, or one beyond the bounds."""


class TooLarge(Undefined):
    """A value is beyond the bounds."""


class Node(NamedTuple):
    """A node of an expression: an operation's name and its operands."""

    kind: str
    parts: tuple[Any, ...] = ()

    def walk(self) -> Iterator[Node]:
        """Yields the node and all below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += [part for part in node.parts if isinstance(part, Node)]


class Style(NamedTuple):
    """How ambiguous notation is read.

    Args:
        tight: 1/2x is 1/(2x).
        decimal_log: log is the logarithm to base 10.
    """

    tight: bool = False
    decimal_log: bool = False


def styles_of(text: str) -> list[Style]:
    """Returns the readings that the notation of a text allows."""
    tight = (False, True) if re.search(r"/\s*\(?[\w.]+\)?\s*(?:[\w\\(]|\^)", text) else (False,)
    logs = (False, True) if re.search(r"log(?!\s*_)", text) else (False,)
    return [Style(t, d) for t in tight for d in logs]


DEFAULT_STYLE = Style()


@lru_cache(maxsize=2048)
def parse(text: str, style: Style = DEFAULT_STYLE) -> Node:
    """Returns the tree of an expression in normalised notation. Raises Unreadable."""
    parser = _Parser(_tokens(text), style)
    node = parser.sum()
    if parser.kind:
        raise Unreadable(f"{parser.text!r:.20} is not expected")
    return node


def _tokens(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    i, text = 0, text.rstrip()
    while i < len(text):
        mark = _TOKEN.match(text, i)
        if mark is None or len(found) > 2 * MAX_NODES:
            raise Unreadable("too long, or a character that no expression has")
        kind = str(mark.lastgroup)
        value = mark[kind]
        if value == "\\":
            raise Unreadable("a backslash")
        if kind == "number" and len(value) > MAX_DIGITS:
            raise Unreadable("a number that is too long")
        blank = "mark" if kind == "escaped" else kind
        found.append((blank, value.replace("\\", "")))
        i = mark.end()
    return found


class _Parser:
    """A recursive-descent parser over tokens."""

    def __init__(self, tokens: Sequence[tuple[str, str]], style: Style) -> None:
        self.tokens = tokens
        self.style = style
        self.i = 0
        self.depth = 0
        self.nodes = 0
        self.bars = 0

    @property
    def kind(self) -> str:
        return self.tokens[self.i][0] if self.i < len(self.tokens) else ""

    @property
    def text(self) -> str:
        return self.tokens[self.i][1] if self.i < len(self.tokens) else ""

    def at(self, *texts: str) -> bool:
        return self.kind in ("mark", "command") and self.text in texts

    def take(self, *texts: str) -> bool:
        if self.at(*texts):
            self.i += 1
            return True
        return False

    def need(self, text: str) -> None:
        if not self.take(text):
            raise Unreadable(f"{text} is missing")

    def node(self, kind: str, *parts: Any) -> Node:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise Unreadable("too many operations")
        return Node(kind, parts)

    def sum(self) -> Node:
        terms = [self.signed()]
        while self.at("+", "-"):
            minus = self.text == "-"
            self.i += 1
            term = self.signed()
            terms.append(self.node("neg", term) if minus else term)
        return terms[0] if len(terms) == 1 else self.node("add", *terms)

    def signed(self) -> Node:
        minus, count = False, 0
        while self.at("+", "-"):
            minus ^= self.text == "-"
            self.i += 1
            count += 1
        if count > 3:
            raise Unreadable("a row of signs")
        term = self.product()
        return self.node("neg", term) if minus else term

    def product(self) -> Node:
        value = self.implicit()
        while self.at("*", "/", "cdot", "times", "div", "bullet"):
            divides = self.text in ("/", "div")
            self.i += 1
            if self.at("-"):
                self.i += 1
                right = self.node("neg", self.implicit() if self.style.tight else self.factor())
            else:
                right = self.implicit() if not divides or self.style.tight else self.factor()
            value = self.node("div" if divides else "mul", value, right)
            if divides and not self.style.tight and self.begins():
                value = self.node("mul", value, self.implicit())
        return value

    def begins(self) -> bool:
        """Returns whether a factor of an implicit product begins here."""
        if self.kind in ("letter", "label", "word"):
            return True
        if self.kind == "command":
            return self.text not in ("cdot", "times", "div", "bullet", "rfloor", "rceil", "rangle",
                                     "degree", "infty")  # fmt: skip
        return self.kind == "mark" and (self.text in "({[" or (self.text == "|" and not self.bars))

    def implicit(self) -> Node:
        value = self.factor()
        while self.begins():
            value = self.node("mul", value, self.factor())
        return value

    def factor(self) -> Node:
        start = self.i
        value = self.atom()
        while True:
            if self.take("^"):
                value = self.node("pow", value, self.exponent())
            elif self.take("!"):
                value = self.node("factorial", value)
            elif self.take("%"):
                value = self.node("div", value, self.node("num", Fraction(100)))
            elif self.take("degree"):
                half = self.node("div", self.node("const", "pi"), self.node("num", Fraction(180)))
                value = self.node("mul", value, half)
            else:
                break
        if self.i == start + 1 and self.tokens[start][0] == "number":
            return self.mixed(value)
        return value

    def mixed(self, whole: Node) -> Node:
        """Returns 1 1/2 and 1\\frac{1}{2} as sums, and other numbers as they are."""
        rest = self.tokens[self.i : self.i + 7]
        shape = "".join("#" if kind == "number" else text[:4] for kind, text in rest)
        if "." in self.tokens[self.i - 1][1]:
            return whole
        mark = _MIXED.match(shape)
        numbers = [text for kind, text in rest if kind == "number"][:2]
        if mark is None or not all(text.isdigit() for text in numbers):
            if shape.startswith("#"):
                raise Unreadable("two numbers without an operator")
            return whole
        if mark[0] == "frac#":
            if len(numbers[0]) != 2:
                return whole
            numbers = list(numbers[0])
        self.i += {"#/#": 3, "frac{#}{#}": 7, "frac#": 2}[mark[0]]
        if not int(numbers[1]):
            raise Unreadable("a fraction of 0")
        part = self.node("num", Fraction(int(numbers[0]), int(numbers[1])))
        return self.node("add", whole, part)

    def exponent(self) -> Node:
        if self.take("{"):
            return self.closed("}")
        minus = self.take("-")
        value = self.atom()
        if self.take("^"):
            value = self.node("pow", value, self.exponent())
        return self.node("neg", value) if minus else value

    def closed(self, end: str) -> Node:
        bars, self.bars = self.bars, 0
        value = self.sum()
        self.bars = bars
        self.need(end)
        return value

    def atom(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        value = self.operand()
        self.depth -= 1
        return value

    def operand(self) -> Node:
        kind, text = self.kind, self.text
        self.i += 1
        if kind == "number":
            return self.node("num", Fraction(text + "0" if text.endswith(".") else text))
        if kind == "letter":
            return self.symbol(text)
        if kind == "label":
            return self.node("sym", self.subscript(text))
        if kind == "word":
            return self.named(_ALIASES.get(text, text))
        if kind == "command":
            return self.command(text)
        if kind == "mark" and text in "({[":
            return self.bracketed(text)
        if kind == "mark" and text == "|":
            self.bars += 1
            value = self.sum()
            self.need("|")
            self.bars -= 1
            return self.node("fun", "abs", value)
        raise Unreadable(f"{text!r:.20} is not expected")

    def bracketed(self, opening: str) -> Node:
        return self.closed({"(": ")", "{": "}", "[": "]"}[opening])

    def subscript(self, name: str) -> str:
        if not self.take("_"):
            return name
        if not self.take("{"):
            self.i += 1
            return f"{name}_{self.tokens[self.i - 1][1]}" if self.i <= len(self.tokens) else name
        start, depth = self.i, 1
        while depth and self.kind:
            depth += self.text == "{"
            depth -= self.text == "}"
            self.i += 1
        inside = "".join(text for _, text in self.tokens[start : self.i - 1])
        return f"{name}_{inside}"

    def symbol(self, letter: str) -> Node:
        if letter in ("e", "i") and not self.at("_"):
            return self.node("const", letter)
        name = self.subscript(letter)
        if (letter.rstrip("'") in _UNKNOWN or "'" in letter) and self.at("("):
            self.i += 1
            return self.node("unknown", name, *self.arguments(")"))
        return self.node("sym", name)

    def arguments(self, end: str) -> list[Node]:
        found = [self.closed_part()]
        while self.take(",", ";"):
            found.append(self.closed_part())
        self.need(end)
        return found

    def closed_part(self) -> Node:
        bars, self.bars = self.bars, 0
        value = self.sum()
        self.bars = bars
        return value

    def named(self, name: str) -> Node:
        if name == "pi":
            return self.node("const", "pi")
        if name in FUNCTIONS:
            return self.function(name)
        return self.symbol_named(name)

    def symbol_named(self, name: str) -> Node:
        name = self.subscript(name)
        return self.node("sym", name)

    def function(self, name: str) -> Node:
        if name == "sqrt" or name == "cbrt":
            return self.root(name)
        base = None
        if name == "log" and self.take("_"):
            base = self.closed("}") if self.take("{") else self.atom()
        power = self.exponent() if self.take("^") else None
        if self.at("(", "["):
            arguments = self.arguments({"(": ")", "[": "]"}[self.opening()])
        elif name in ("max", "min", "gcd", "lcm"):
            raise Unreadable(f"{name} has no arguments")
        else:
            arguments = [self.unbracketed()]
        inverse = power is not None and power.kind == "neg" and power.parts[0].parts == (1,)
        if inverse and name in ("sin", "cos", "tan", "cot"):
            return self.node("fun", "arc" + name, *arguments)
        parts = [*arguments, base] if base is not None else arguments
        value = self.node("fun", name, *parts)
        return value if power is None else self.node("pow", value, power)

    def opening(self) -> str:
        self.i += 1
        return self.tokens[self.i - 1][1]

    def unbracketed(self) -> Node:
        """Returns the argument of a function without brackets: \\sin 2x \\cos y ends at \\cos."""
        minus = self.take("-")
        value = self.factor()
        while self.begins() and not self.at("(", "["):
            if self.kind in ("word", "command") and self.text in FUNCTIONS:
                break
            value = self.node("mul", value, self.factor())
        return self.node("neg", value) if minus else value

    def root(self, name: str) -> Node:
        degree = self.node("num", Fraction(3 if name == "cbrt" else 2))
        if self.take("["):
            degree = self.closed("]")
        if self.take("{"):
            value = self.closed("}")
        elif self.take("("):
            value = self.closed(")")
        else:
            value = self.atom()
        return self.node("root", value, degree)

    def command(self, name: str) -> Node:
        if name in ("pi", *_GREEK, "ell"):
            return self.named(name)
        if name in FUNCTIONS or name in _ALIASES:
            return self.function(_ALIASES.get(name, name))
        if name == "frac":
            return self.node("div", *self.fraction())
        if name == "binom":
            return self.node("binom", *self.fraction())
        if name in ("lfloor", "lceil"):
            value = self.closed("r" + name[1:])
            return self.node("fun", "floor" if name == "lfloor" else "ceil", value)
        if name in _ACCENTS:
            return self.node("sym", f"{name} {self.raw()}")
        if name == "text":
            return self.node("sym", self.raw().strip())
        if name == "infty":
            return self.node("sym", "infty")
        raise Unreadable(f"the command {name!r:.20}")

    def raw(self) -> str:
        """Returns the text of a group or token."""
        if not self.take("{"):
            self.i += 1
            return self.tokens[self.i - 1][1] if self.i <= len(self.tokens) else ""
        start, depth = self.i, 1
        while depth and self.kind:
            depth += self.text == "{"
            depth -= self.text == "}"
            self.i += 1
        return "".join(text for _, text in self.tokens[start : self.i - 1])

    def fraction(self) -> tuple[Node, Node]:
        r"""Returns numerator and denominator; \frac12 and \frac1{2} have one digit each."""
        if self.kind == "number" and self.text.isdigit() and len(self.text) == 2:
            over, under = tuple(self.text)
            self.i += 1
            return self.node("num", Fraction(over)), self.node("num", Fraction(under))
        return self.group(), self.group()

    def group(self) -> Node:
        return self.closed("}") if self.take("{") else self.atom()


def variables(node: Node) -> set[str]:
    """Returns the names of a tree's variables."""
    return {part.parts[0] for part in node.walk() if part.kind == "sym"}


def is_constant(node: Node) -> bool:
    """Returns whether a tree has neither variables nor unknown functions."""
    return all(part.kind not in ("sym", "unknown") for part in node.walk())


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """Returns the tree with variables renamed."""
    if node.kind == "sym":
        return Node("sym", (names.get(node.parts[0], node.parts[0]),))
    parts = (renamed(p, names) if isinstance(p, Node) else p for p in node.parts)
    return Node(node.kind, tuple(parts))


def _mp() -> Any:
    import mpmath  # type: ignore[import-untyped]

    if mpmath.mp.dps != DIGITS:
        mpmath.mp.dps = DIGITS
    return mpmath


def _inexact(value: Number) -> Any:
    mp = _mp()
    if isinstance(value, Fraction):
        return mp.mpf(value.numerator) / mp.mpf(value.denominator)
    return value


def _checked(value: Number) -> Number:
    """Returns a value within the bounds, real where it is. Raises Undefined."""
    if isinstance(value, Fraction):
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        return value if bits <= MAX_BITS else _inexact(value)
    mp = _mp()
    if not mp.isfinite(value):
        raise Undefined("no finite value")
    if isinstance(value, mp.mpc) and abs(value.imag) <= abs(value.real) * mp.mpf(10) ** -45:
        value = value.real
    if value and abs(mp.mag(value)) > MAX_MAGNITUDE:
        raise TooLarge("a number beyond the bounds")
    return value


def evaluate(node: Node, point: Mapping[str, Fraction], real: bool = False) -> Number:
    """Returns the value of a tree at a point. Raises Undefined where there is none.

    With `real` no part may have a value that is not real.
    """
    try:
        return _evaluate(node, point, real)
    except (ZeroDivisionError, OverflowError, ValueError, TypeError) as error:
        raise Undefined(str(error)) from error


def _evaluate(node: Node, point: Mapping[str, Fraction], real: bool) -> Number:
    kind, parts = node
    values = [_evaluate(part, point, real) for part in parts if isinstance(part, Node)]
    value = _value(kind, parts, values, point)
    if real and not is_real(value):
        raise Undefined("a value that is not real")
    return value


def _value(
    kind: str, parts: Sequence[Any], values: list[Number], point: Mapping[str, Fraction]
) -> Number:
    """Returns the value of one operation."""
    if kind == "num":
        return parts[0]
    if kind == "sym":
        return point[parts[0]]
    if kind == "const":
        mp = _mp()
        return {"pi": +mp.pi, "e": +mp.e, "i": mp.mpc(0, 1)}[parts[0]]
    if kind == "add":
        return _sum(values)
    if kind == "neg":
        return -values[0]
    if kind in ("mul", "div"):
        return _checked(_both(values, kind))
    if kind == "pow":
        return _checked(_power(*values))
    if kind == "root":
        return _checked(_root(*values))
    if kind == "factorial":
        return _checked(_factorial(values[0]))
    if kind == "binom":
        return _binomial(*values)
    if kind == "unknown":
        return _arbitrary(parts[0], values)
    return _checked(_function(parts[0], values))


def _sum(values: Sequence[Number]) -> Number:
    """Returns a sum, exactly 0 where nothing but rounding is left of its terms."""
    if all(isinstance(value, Fraction) for value in values):
        return _checked(sum(values, Fraction(0)))
    mp = _mp()
    terms = [_inexact(value) for value in values]
    total = mp.fsum(terms)
    largest = max(abs(term) for term in terms)
    return Fraction(0) if abs(total) <= largest * mp.mpf(10) ** (8 - DIGITS) else _checked(total)


def _both(values: Sequence[Number], kind: str) -> Number:
    left, right = values
    if not (isinstance(left, Fraction) and isinstance(right, Fraction)):
        left, right = _inexact(left), _inexact(right)
    return left * right if kind == "mul" else left / right


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        n = int(exponent)
        if isinstance(base, Fraction):
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(n) * bits <= MAX_BITS:
                return base**n
    if isinstance(exponent, Fraction) and exponent.denominator in (2, 3, 4):
        root = _root(base, Fraction(exponent.denominator))
        if isinstance(root, Fraction):
            return _power(root, Fraction(exponent.numerator))
    mp = _mp()
    base, exponent = _inexact(base), _inexact(exponent)
    if base == 0:
        if mp.re(exponent) <= 0:
            raise Undefined("a power of 0")
        return Fraction(0)
    if mp.mag(exponent) > 40 or mp.mag(mp.log(base)) + mp.mag(exponent) > 41:
        raise TooLarge("an exponent beyond the bounds")
    return mp.power(base, exponent)


def _root(value: Number, degree: Number) -> Number:
    if isinstance(degree, Fraction) and degree.denominator == 1 and 2 <= degree <= 100:
        n = int(degree)
        if isinstance(value, Fraction):
            sign = -1 if value < 0 else 1
            if sign > 0 or n % 2:
                over = _integer_root(abs(value.numerator), n)
                under = _integer_root(value.denominator, n)
                if over is not None and under is not None:
                    return Fraction(sign * over, under)
        value = _inexact(value)
        mp = _mp()
        if n % 2 and isinstance(value, mp.mpf) and value < 0:
            return -mp.root(-value, n)
        return mp.sqrt(value) if n == 2 else mp.root(value, n)
    return _power(value, 1 / degree)


def _integer_root(value: int, n: int) -> int | None:
    if n == 2:
        root = isqrt(value)
    elif value.bit_length() > 2000:
        return None
    else:
        root = round(float(_mp().root(value, n))) if value.bit_length() < 1000 else -1
    return root if root >= 0 and root**n == value else None


def _factorial(value: Number) -> Number:
    if isinstance(value, Fraction):
        if value.denominator == 1 and 0 <= value <= MAX_FACTORIAL:
            return Fraction(factorial(int(value)))
        if value.denominator == 1 and value < 0:
            raise Undefined("a factorial of a negative number")
    mp = _mp()
    value = _inexact(value)
    if mp.mag(value) > 30:
        raise TooLarge("a factorial beyond the bounds")
    return mp.factorial(value)


def _binomial(n: Number, k: Number) -> Number:
    whole = all(isinstance(x, Fraction) and x.denominator == 1 for x in (n, k))
    if whole and 0 <= n <= MAX_FACTORIAL and k >= 0:
        return Fraction(comb(int(n), int(k)))
    mp = _mp()
    n, k = _inexact(n), _inexact(k)
    if mp.mag(n) > 30 or mp.mag(k) > 30:
        raise TooLarge("a binomial coefficient beyond the bounds")
    return _checked(mp.binomial(n, k))


def _function(name: str, values: list[Number]) -> Number:
    mp = _mp()
    if all(isinstance(value, Fraction) for value in values):
        exact = _exact_function(name, values)
        if exact is not None:
            return exact
    x, *rest = [_inexact(value) for value in values]
    if mp.mag(x) > 200 and name not in ("ln", "log", "lg", "abs"):
        raise TooLarge(f"an argument of {name} beyond the bounds")
    if name in ("ln", "log", "lg"):
        base = rest[0] if rest else (mp.mpf(10) if name == "lg" else None)
        if x == 0 or base in (0, 1):
            raise Undefined("a logarithm of 0")
        return mp.log(x) if base is None else mp.log(x) / mp.log(base)
    if name == "exp":
        return _power(+mp.e, x)
    if name in ("max", "min"):
        return (max if name == "max" else min)([x, *rest])
    functions: dict[str, Callable[..., Any]] = {
        "abs": abs, "floor": mp.floor, "ceil": mp.ceil, "sgn": mp.sign, "cbrt": mp.cbrt,
    }  # fmt: skip
    own = functions.get(name) or getattr(mp, name.replace("arc", "a", 1), None)
    if own is None or rest:
        raise Undefined(f"{name} of {len(values)} arguments")
    return own(x)


def _exact_function(name: str, values: list[Fraction]) -> Fraction | None:
    x, rest = values[0], values[1:]
    if name == "abs" and not rest:
        return abs(x)
    if name == "floor" and not rest:
        return Fraction(x.numerator // x.denominator)
    if name == "ceil" and not rest:
        return Fraction(-(-x.numerator // x.denominator))
    if name in ("max", "min"):
        return max(values) if name == "max" else min(values)
    if name in ("gcd", "lcm") and all(v.denominator == 1 for v in values) and len(values) < 9:
        return Fraction((gcd if name == "gcd" else lcm)(*map(int, values)))
    return None


def _arbitrary(name: str, values: Sequence[Number]) -> Fraction:
    """Returns a value that depends on a function's name and arguments alone."""
    mp = _mp()
    shown = [mp.nstr(_inexact(value), 30) for value in values]
    digest = hashlib.sha256(repr((name, shown)).encode()).digest()
    return Fraction(int.from_bytes(digest[:4]) % 9973 + 2, digest[4] % 30 + 1)


def point_of(names: Sequence[str], index: int) -> dict[str, Fraction]:
    """Returns the `index`-th point at which expressions are compared."""
    found = {}
    for name in names:
        digest = hashlib.sha256(f"{index} {name}".encode()).digest()
        if name in INTEGERS:
            found[name] = Fraction(2 + (digest[0] % 12) * 2 + index % 2)
            continue
        value = Fraction(digest[0] % 89 + 11, digest[1] % 23 + 17)
        found[name] = -value if index >= POINTS // 2 and digest[2] % 3 else value
    return found


def close(a: Number, b: Number) -> bool:
    """Returns whether two values are the same number."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    mp = _mp()
    a, b = _inexact(a), _inexact(b)
    return bool(abs(a - b) <= max(abs(a), abs(b)) * mp.mpf(10) ** -40)


def is_real(value: Number) -> bool:
    """Returns whether a value is a real number."""
    return isinstance(value, Fraction) or bool(_mp().im(value) == 0)


def equal(left: Node, right: Node) -> bool:
    """Returns whether two trees have the same values."""
    names = sorted(variables(left) | variables(right))
    if not names:
        return _agree(left, right, {}) is True
    agreed = 0
    real = all(part != Node("const", ("i",)) for node in (left, right) for part in node.walk())
    for index in range(POINTS):
        same = _agree(left, right, point_of(names, index), real)
        if same is False:
            return False
        agreed += same is True
    return agreed >= 2


def _agree(
    left: Node, right: Node, point: Mapping[str, Fraction], real: bool = False
) -> bool | None:
    """Returns whether two values agree; None where one is undefined."""
    try:
        a, b = evaluate(left, point, real), evaluate(right, point, real)
    except TooLarge:
        return False
    except Undefined:
        return None
    return close(a, b)


def constant(node: Node) -> Number | None:
    """Returns the value of a tree without variables, else None."""
    if not is_constant(node):
        return None
    try:
        return evaluate(node, {})
    except Undefined:
        return None


def as_fraction(value: Number) -> Fraction:
    """Returns a real value as a fraction, to 50 digits where it is not exact."""
    if isinstance(value, Fraction):
        return value
    if value and _mp().mag(value) > 4 * MAX_BITS:
        return Fraction(2) ** (2 * MAX_BITS)  # beyond all bounds
    if value and _mp().mag(value) < -4 * MAX_BITS:
        return Fraction(0)
    return Fraction(_mp().nstr(value, 50))


def proportional(left: Node, right: Node) -> int:
    """Returns the sign of the constant ratio of two trees, 0 where it is not constant."""
    names = sorted(variables(left) | variables(right))
    ratio = None
    for index in range(POINTS):
        try:
            point = point_of(names, index)
            a, b = evaluate(left, point), evaluate(right, point)
            if not a or not b:
                return 0
            now = _both([a, b], "div")
        except Undefined:
            continue
        if ratio is not None and not close(ratio, now):
            return 0
        ratio = now
    if ratio is None or not is_real(ratio):
        return 0
    return 1 if ratio > 0 else -1
