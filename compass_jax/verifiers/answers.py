"""Answers read without evaluating them: arithmetic, expressions, lists, decimals.

Some of reasoning-gym's scorers give an answer to Python (`eval`, sympy's `parse_expr`). Here are
readers that take their place: each knows a grammar of what an honest answer can be, and whatever
is outside of it raises AnswerError, as something that cannot be parsed.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from compass_jax.errors import CompassError

MOST_CHARS = 10_000
MOST_NESTED = 50
MOST_DIGITS = 200  # of a number that is written
MOST_BITS = 20_000  # of a number that comes out of a power
MOST_EXPONENT = 64

_ARITHMETIC = re.compile(r"[-+*/().\d\s]*")
_SYMBOLIC = re.compile(r"[-+*/(),.\dA-Za-z\s]*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{0,9}")
_DECIMAL = re.compile(r"[-+]?(?:\d+|[1-9]\d{0,2}(?:,\d{3})+)?(?:(?<=\d)\.|\.\d+)?")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}|([-+]?\d+)\s*/\s*(\d+)")
_WRAPPED = re.compile(r"\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\\boxed\{([^{}]*)\}", re.DOTALL)
_LONG = re.compile(rf"\d{{{MOST_DIGITS + 1}}}")
_MARKS = re.compile(rf"[\[({{\])}}]|(?:[-+~]\s*){{{MOST_NESTED}}}")
_PROGRAM = re.compile(
    r"__|\blambda\b|\bimport\b|\)\s*\(\s*\)|"
    r"\b(?:eval|exec|compile|getattr|setattr|globals|open|print|system|sympify)\s*\("
)

_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "sinh", "cosh"}
    | {"tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs", "Integral"}
)
_CONSTANTS = ("pi", "E", "I")
_NODES = (
    *(ast.Constant, ast.UnaryOp, ast.BinOp, ast.Name, ast.Call, ast.Load, ast.USub, ast.UAdd),
    *(ast.Pow, *_OPERATORS),
)


class AnswerError(CompassError, ValueError):
    """An answer outside of the grammar."""


def arithmetic(text: str, *_: Any, **__: Any) -> Fraction:
    """The value of numbers joined by + - * / ** and brackets. Raises AnswerError."""
    return _value(_tree(text, _ARITHMETIC), text.strip(), lambda name: None)


def expression(text: str, local_dict: dict[str, Any] | None = None, **_: Any) -> Any:
    """The sympy expression of numbers, letters and elementary functions. Raises AnswerError.

    A name is what `local_dict` says, a function or constant of mathematics, or else a symbol. What
    sympy or Python mean something else by is refused.
    """
    import sympy

    def named(name: str) -> Any:
        if local_dict and name in local_dict:
            return local_dict[name]
        known = name in _FUNCTIONS or name in _CONSTANTS
        return getattr(sympy, name) if known else sympy.Symbol(_symbol(name))

    return _value(_tree(text, _SYMBOLIC), text.strip(), named)


def _symbol(name: str) -> str:
    import sympy

    if not _NAME.fullmatch(name) or hasattr(sympy, name) or hasattr(builtins, name):
        raise AnswerError(f"the name {name!r}")
    return name


def is_arithmetic(text: str) -> bool:
    """Whether `arithmetic` can read a text."""
    try:
        arithmetic(text)
    except (AnswerError, ArithmeticError):
        return False
    return True


def is_expression(text: str) -> bool:
    """Whether `expression` may read a text: the form alone, nothing is built."""
    try:
        for node in ast.walk(_tree(text, _SYMBOLIC)):
            if not isinstance(node, _NODES):
                return False
    except AnswerError:
        return False
    return True


def literal(text: str, *_: Any) -> list | str:
    """A text or a list (of lists) of numbers and texts, as written out. Raises AnswerError."""
    text = text.strip()
    _bounded(text)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise AnswerError(f"no list: {error}") from error
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)):
        raise AnswerError("no list")
    _refuse_other(value)
    return list(value)


def _refuse_other(value: Any) -> None:
    for item in value:
        if isinstance(item, (list, tuple)):
            _refuse_other(item)
        elif not isinstance(item, (int, float, str)):
            raise AnswerError(f"a {type(item).__name__} in a list")


def _bounded(text: str) -> None:
    if len(text) > MOST_CHARS:
        raise AnswerError(f"{len(text)} characters")
    if _LONG.search(text):
        raise AnswerError("a number that is too long")
    depth = 0
    for mark in _MARKS.findall(text):
        depth += 1 if mark in "[({" else -1
        if depth > MOST_NESTED or len(mark) > 1:
            raise AnswerError("nested too deeply")


def _tree(text: str, characters: re.Pattern) -> ast.expr:
    text = text.strip()
    _bounded(text)
    if not characters.fullmatch(text) or re.search(r"\d[A-Za-z]", re.sub(_NAME, "a", text)):
        raise AnswerError("characters that no such answer has")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise AnswerError(f"not an expression: {error}") from error


def _value(node: ast.expr, text: str, named: Callable[[str], Any]) -> Any:
    """The value of `node` in sympy's numbers, or in fractions where `named` knows no names."""
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _number(node, text, named)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
            value = _value(inner, text, named)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, text, named), _value(right, text, named))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            first = _value(left, text, named)
            return _OPERATORS[type(sign)](first, _value(right, text, named))
        case ast.Name(id=name) if name not in _FUNCTIONS and (value := named(name)) is not None:
            return value
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]):
            if name in _FUNCTIONS and len(args) <= 2 and (call := named(name)) is not None:
                return call(*[_value(one, text, named) for one in args])
    raise AnswerError(f"{type(node).__name__} has no place in an answer")


def _number(node: ast.Constant, text: str, named: Callable[[str], Any]) -> Any:
    written = ast.get_source_segment(text, node) or ""
    if not re.fullmatch(r"\d+|\d*\.\d*", written):
        raise AnswerError(f"the number {written[:20]!r}")
    if named("x") is None:
        return Fraction(written + "0" if written.endswith(".") else written)
    import sympy

    return sympy.Integer(written) if written.isdigit() else sympy.Float(written)


def _power(base: Any, exponent: Any) -> Any:
    """A power whose exponent, where it is a number, is small and makes no giant."""
    plain = isinstance(base, Fraction)
    if plain or exponent.is_number:
        size: Fraction | None = None
        with contextlib.suppress(ValueError):
            size = abs(Fraction(str(exponent)))
        if plain and exponent.denominator != 1:
            raise AnswerError("a root")
        if size is not None and max(size, Fraction(size.denominator)) > MOST_EXPONENT:
            raise AnswerError("an exponent that is too large")
        if size is not None and (plain or base.is_Rational):
            numerator = base.numerator if plain else base.p
            denominator = base.denominator if plain else base.q
            bits = max(int(numerator).bit_length(), int(denominator).bit_length())
            if bits * size > MOST_BITS:
                raise AnswerError("a number that is too large")
    return base ** int(exponent) if plain else base**exponent


def is_program(text: str) -> bool:
    """Whether an answer is program text, which no mathematics is."""
    return bool(_PROGRAM.search(text))


@lru_cache(maxsize=4096)
def exact(text: str) -> tuple[str, Fraction] | None:
    """A plain decimal ("decimal") or a plain fraction ("fraction") with its value, else None."""
    text = text.strip()
    if len(text) > MOST_DIGITS:
        return None
    while found := _WRAPPED.fullmatch(text):
        text = next(part for part in found.groups() if part is not None).strip()
    text = text.replace("\u2212", "-")
    if _DECIMAL.fullmatch(text) and text.lstrip("+-"):
        return "decimal", Fraction(Decimal(text.replace(",", "")))
    if found := _FRACTION.fullmatch(text):
        top = f"{found[1]}{found[2]}" if found[2] else found[4]
        bottom = int(found[3] or found[5])
        return ("fraction", Fraction(int(top), bottom)) if bottom else None
    return None
