"""Parser of expressions in normalised notation.

The text comes from a model and is untrusted. It is not evaluated, names are looked up only in the
tables below, and length, number of operations and nesting are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from compass_jax.base.aliases import Value
from compass_jax.base.errors import CompassError

MAX_NODES = 600
MAX_DEPTH = 60
MAX_DIGITS = 4_000  # maximum length of a number

FUNCTIONS = frozenset(
    str.split(
        "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth ln log lg"
        " exp sqrt cbrt abs max min gcd lcm floor ceil sgn arcsinh arccosh arctanh"
    )
)
_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "Abs": "abs", "sign": "sgn"}
_INVERSE = frozenset(("sin", "cos", "tan", "cot"))  # functions whose inverse is written f^{-1}
_GREEK = frozenset(
    str.split(
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma"
        " tau upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
        " hbar nabla"
    )
)
_ACCENTS = frozenset(
    str.split("overline bar vec hat tilde widehat overrightarrow dot ddot angle triangle")
)
_UNKNOWN = frozenset("fghFGHPpQqRrWTL")  # letters that name a function if "(" follows
_WORDS = sorted(
    {*FUNCTIONS, *_ALIASES, "pi", *_GREEK} - {"nu", "mu", "xi", "eta", "chi", "rho"},
    key=len,
    reverse=True,
)
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)|\\(?P<command>[A-Za-z]+)|\\(?P<escaped>[{}|])|"
    rf"(?P<word>{'|'.join(_WORDS)})(?![a-z])|(?P<label>[A-Z]{{2,}}'*)|(?P<letter>[^\W\d_]'*)|"
    r"(?P<mark>[^\s\\]))"
)
# A mixed number, 3 1/2 or 3\frac{1}{2}, whose denominator is not 0.
_MIXED = re.compile(
    r"(?<![\w.^])(\d+)(\s*\\frac\s*(?=\{\s*\d+\s*\}\s*\{\s*0*[1-9]\d*\s*\})|\s+(?=\d+/0*[1-9]))"
    r"(\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|\d+/\d+)"
)
# A fraction of two digits without braces: \frac12.
_SHORT_FRACTION = re.compile(r"(\\?frac)\s*(\d)(\d)(?!\d)")
_CLOSING = {"(": ")", "{": "}", "[": "]"}
_TIMES = ("*", "/", "cdot", "times", "div", "bullet")
_NO_FACTOR = frozenset((*_TIMES, "rfloor", "rceil", "rangle", "degree", "infty"))
SUM, PRODUCT, IMPLICIT, FACTOR = range(4)  # precedence of operators


class Unreadable(CompassError, ValueError):
    """The text is not an expression of this grammar."""


class Node(NamedTuple):
    """A node of an expression tree: "num", "const", "sym", or an operation with its operands."""

    kind: str
    parts: tuple[Value, ...] = ()

    def walk(self) -> Iterator[Node]:
        """Yields the node and its descendants."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += [part for part in node.parts if isinstance(part, Node)]


def num(value: Fraction | int) -> Node:
    """Returns the node of a number."""
    return Node("num", (Fraction(value),))


PI = Node("const", ("pi",))
DEGREE = Node("div", (PI, num(180)))
INFINITY = Node("sym", ("infty",))


def variables(node: Node) -> set[str]:
    """Returns the names of a tree's variables."""
    return {part.parts[0] for part in node.walk() if part.kind == "sym"}


def is_constant(node: Node) -> bool:
    """Returns whether a tree has neither variables nor unknown functions."""
    return all(part.kind not in ("sym", "unknown") for part in node.walk())


def is_infinite(node: Node) -> bool:
    """Returns whether a tree is plus or minus infinity."""
    return node in (INFINITY, Node("neg", (INFINITY,)))


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """Returns the tree with renamed variables."""
    if node.kind == "sym":
        return Node("sym", (names.get(node.parts[0], node.parts[0]),))
    parts = (renamed(p, names) if isinstance(p, Node) else p for p in node.parts)
    return Node(node.kind, tuple(parts))


def readings(text: str) -> tuple[Node, ...]:
    """Returns the possible trees of a text: 1/2x is (1/2)x or 1/(2x); none for other texts."""
    trees = []
    for tight in (False, True) if "/" in text else (False,):
        try:
            trees.append(parse(text, tight))
        except Unreadable:
            continue
    return tuple(dict.fromkeys(trees))


@lru_cache(maxsize=2048)
def parse(text: str, tight: bool = False) -> Node:
    """Returns the tree of an expression. Raises Unreadable for other texts.

    With `tight`, implicit multiplication binds tighter than division.
    """
    text = _SHORT_FRACTION.sub(r"\1{\2}{\3}", text)
    text = _MIXED.sub(lambda m: f"({m[1]}+{m[2].strip()}{m[3]})", text)
    parser = _Parser(_tokens(text), tight)
    node = parser.expression()
    if parser.kind:
        raise Unreadable(f"{parser.text!r:.20} is not expected")
    return node


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    i, text = 0, text.rstrip()
    while i < len(text):
        mark = _TOKEN.match(text, i)
        if mark is None or len(tokens) > 2 * MAX_NODES:
            raise Unreadable("too long, or a character that no expression has")
        kind = str(mark.lastgroup)
        if kind == "number" and len(mark[kind]) > MAX_DIGITS:
            raise Unreadable("a number that is too long")
        tokens.append(("mark" if kind == "escaped" else kind, mark[kind]))
        i = mark.end()
    return tokens


class _Parser:
    """A Pratt parser for a sequence of tokens."""

    def __init__(self, tokens: Sequence[tuple[str, str]], tight: bool) -> None:
        self.tokens = [*tokens, ("", "")]
        self.implicit = IMPLICIT if tight else PRODUCT
        self.i = 0
        self.depth = 0
        self.nodes = 0
        self.bars = 0

    @property
    def kind(self) -> str:
        return self.tokens[self.i][0]

    @property
    def text(self) -> str:
        return self.tokens[self.i][1]

    def next(self) -> tuple[str, str]:
        token = self.tokens[self.i]
        if not token[0]:
            raise Unreadable("the text ends early")
        self.i += 1
        return token

    def at(self, *texts: str) -> bool:
        kind, text = self.tokens[self.i]
        return text in texts and kind in ("mark", "command")

    def take(self, *texts: str) -> bool:
        if self.at(*texts):
            self.i += 1
            return True
        return False

    def node(self, kind: str, *parts: Value) -> Node:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise Unreadable("too many operations")
        return Node(kind, parts)

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")

    def expression(self, level: int = SUM) -> Node:
        """Returns the longest expression whose operators bind at least as tightly as `level`."""
        left = self.signed(level)
        while True:
            if level <= SUM and self.at("+", "-"):  # the sign belongs to the term
                terms = left.parts if left.kind == "add" else (left,)
                left = self.node("add", *terms, self.expression(PRODUCT))
            elif level <= PRODUCT and self.at(*_TIMES):
                kind = "div" if self.next()[1] in ("/", "div") else "mul"
                # If implicit products bind tighter, the right operand takes them: 1/2x is 1/(2x).
                right = IMPLICIT if self.implicit == IMPLICIT else FACTOR
                left = self.node(kind, left, self.expression(right))
            elif level <= self.implicit and self.begins():
                left = self.node("mul", left, self.factor())
            else:
                return left

    def signed(self, level: int) -> Node:
        signs = ""
        while self.at("+", "-") and len(signs) < 3:
            signs += self.next()[1]
        if not signs:
            return self.factor()
        value = self.expression(max(level, PRODUCT))
        return self.node("neg", value) if signs.count("-") % 2 else value

    def begins(self) -> bool:
        """Returns whether a factor of an implicit product begins here."""
        if self.kind == "mark":
            # Inside bars, the next bar closes them.
            return self.text in _CLOSING or (self.text == "|" and not self.bars)
        # A number begins none: "2 3" is not a product.
        return self.kind not in ("", "number") and self.text not in _NO_FACTOR

    def factor(self) -> Node:
        value = self.operand()
        while True:
            if self.take("^"):
                value = self.node("pow", value, self.exponent())
            elif self.take("!"):
                value = self.node("factorial", value)
            elif self.take("%"):
                value = self.node("div", value, num(100))
            elif self.take("degree"):
                value = self.node("mul", value, DEGREE)
            else:
                return value

    def exponent(self) -> Node:
        self.deeper()
        minus = self.take("-")
        value = self.operand()
        if self.take("^"):
            value = self.node("pow", value, self.exponent())
        self.depth -= 1
        return self.node("neg", value) if minus else value

    def closed(self, *ends: str, separators: tuple[str, ...] = ()) -> list[Node]:
        """Returns the expressions before a closing bracket."""
        # Inside brackets a bar opens again, even between outer bars.
        bars, self.bars = self.bars, 0
        values = [self.expression()]
        while separators and self.take(*separators):
            values.append(self.expression())
        self.bars = bars
        if not self.take(*ends):
            raise Unreadable(f"{ends[0]} is missing")
        return values

    def operand(self) -> Node:
        self.deeper()
        kind, text = self.next()
        if kind == "number":
            value = num(Fraction(text + "0" if text.endswith(".") else text))
            self.nodes += 1
        elif kind == "letter":
            value = self.letter(text)
        elif kind == "label":
            value = self.symbol(text)
        elif kind in ("word", "command"):
            value = self.named(_ALIASES.get(text, text))
        elif text in _CLOSING:
            value = self.closed(_CLOSING[text])[0]
        elif text == "|":
            self.bars += 1
            value = self.node("abs", self.expression())
            self.bars -= 1
            if not self.take("|"):
                raise Unreadable("| is missing")
        else:
            raise Unreadable(f"{text!r:.20} is not expected")
        self.depth -= 1
        return value

    def raw(self) -> str:
        """Returns the text of a group or token."""
        if not self.take("{"):
            return self.next()[1]
        start, depth = self.i, 1
        while depth:
            depth += {"{": 1, "}": -1}.get(self.next()[1], 0)
        return "".join(text for _, text in self.tokens[start : self.i - 1])

    def symbol(self, name: str) -> Node:
        return self.node("sym", f"{name}_{self.raw()}" if self.take("_") else name)

    def letter(self, text: str) -> Node:
        if text in ("e", "i") and not self.at("_"):
            return self.node("const", text)
        name = self.symbol(text)
        if (text.rstrip("'") in _UNKNOWN or "'" in text) and self.take("("):
            return self.node("unknown", *name.parts, *self.closed(")", separators=(",", ";")))
        return name

    def named(self, name: str) -> Node:
        if name == "pi":
            return PI
        if name in ("sqrt", "cbrt"):
            return self.root(num(3 if name == "cbrt" else 2))
        if name in FUNCTIONS:
            return self.function(name)
        if name in ("frac", "binom"):
            return self.node("div" if name == "frac" else name, self.operand(), self.operand())
        if name in ("lfloor", "lceil"):
            return self.node(name[1:], *self.closed("r" + name[1:]))
        if name in _GREEK or name == "infty":
            return self.symbol(name)
        if name in _ACCENTS:
            return self.node("sym", f"{name} {self.raw()}")
        if name == "text":
            return self.node("sym", self.raw().strip())
        raise Unreadable(f"the command {name!r:.20}")

    def root(self, degree: Node) -> Node:
        if self.take("["):
            (degree,) = self.closed("]")
        return self.node("pow", self.operand(), self.node("div", num(1), degree))

    def function(self, name: str) -> Node:
        base = [self.operand()] if name == "log" and self.take("_") else []
        power = self.exponent() if self.take("^") else None
        if self.at("(", "["):
            end = _CLOSING[self.next()[1]]
            arguments = self.closed(end, separators=(",", ";"))
        elif name in ("max", "min", "gcd", "lcm"):
            raise Unreadable(f"{name} has no arguments")
        else:
            arguments = [self.unbracketed()]
        # sin^{-1} x is the inverse function; sin^2 x is a power of the value.
        if power == Node("neg", (num(1),)) and name in _INVERSE:
            return self.node("arc" + name, *arguments)
        value = self.node(name, *arguments, *base)
        return value if power is None else self.node("pow", value, power)

    def unbracketed(self) -> Node:
        """Returns the argument of a function without brackets: \\sin 2x \\cos y ends at \\cos."""
        minus = self.take("-")
        value = self.factor()
        while self.begins() and not self.at("(", "["):
            if self.kind in ("word", "command") and self.text in FUNCTIONS:
                break
            value = self.node("mul", value, self.factor())
        return self.node("neg", value) if minus else value
