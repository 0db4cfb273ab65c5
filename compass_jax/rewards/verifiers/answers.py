"""Parsers of answers that evaluate nothing: arithmetic, expressions, lists, decimals.

Some of reasoning-gym's scorers pass an answer to Python (`eval`, sympy's `parse_expr`). These
functions accept only the grammar of honest answers; other answers never reach such a scorer.
"""

from __future__ import annotations

import ast
import builtins
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from compass_jax.base.aliases import Json
from compass_jax.base.errors import CompassError
from compass_jax.rewards.verifiers.extract import hashed

MOST_CHARS = 10_000
MOST_NESTED = 50
MOST_DIGITS = 200  # maximum length of a number
MOST_BITS = 20_000  # maximum size of the result of a power
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
_SIGNS = (ast.Load, ast.USub, ast.UAdd, ast.Pow, *_OPERATORS)


class AnswerError(CompassError, ValueError):
    """An answer that the grammar does not accept."""


def arithmetic(text: str) -> Fraction:
    """Returns the value of numbers joined by + - * / ** and brackets. Raises AnswerError."""
    return _value(_tree(text, _ARITHMETIC), text.strip())


def is_arithmetic(text: str) -> bool:
    """Returns whether `arithmetic` accepts a text."""
    try:
        arithmetic(text)
    except (AnswerError, ArithmeticError):
        return False
    return True


def is_expression(text: str) -> bool:
    """Returns whether a text is an expression of numbers, symbols and elementary functions.

    A symbol is a short name without a meaning in sympy and Python.
    """
    try:
        tree = _tree(text, _SYMBOLIC)
        functions: set[ast.expr] = set()
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]):
                    if name not in _FUNCTIONS or len(args) > 2:
                        return False
                    functions.add(node.func)
                case ast.Name(id=name):
                    if node not in functions and not _is_symbol(name):
                        return False
                case ast.Constant():
                    _number(node, text.strip())
                case ast.BinOp(left=left, op=ast.Pow(), right=right):
                    _check_power(left, right, text.strip())
                case ast.UnaryOp() | ast.BinOp():
                    pass
                case _ if not isinstance(node, _SIGNS):
                    return False
    except (AnswerError, ArithmeticError):
        return False
    return True


def _is_symbol(name: str) -> bool:
    import sympy

    is_free = not hasattr(sympy, name) and not hasattr(builtins, name)
    return name in _CONSTANTS or (is_free and _NAME.fullmatch(name) is not None)


def _check_power(base: ast.expr, exponent: ast.expr, text: str) -> None:
    """Raises AnswerError for a power of numbers that is too large."""
    if any(isinstance(node, ast.Name) for node in ast.walk(exponent)):
        return
    size = _value(exponent, text)
    named = any(isinstance(node, ast.Name) for node in ast.walk(base))
    _check_size(None if named else _value(base, text), size)


def is_inert(text: str) -> bool:
    """Returns whether Python's `eval` runs nothing of a text: it is a number, a text, a (nested)
    list of these, or no Python.
    """
    try:
        _check_form(text)
        _check_items([ast.literal_eval(text)])
    except SyntaxError:
        return True
    except (ValueError, RecursionError, MemoryError, TypeError):
        return False
    return True


def _check_items(value: Json) -> None:
    for item in value:
        if isinstance(item, list | tuple):
            _check_items(item)
        elif not isinstance(item, int | float | str):
            raise AnswerError(f"a {type(item).__name__} in a list")


def _check_form(text: str) -> None:
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
    _check_form(text)
    if not characters.fullmatch(text) or re.search(r"\d[A-Za-z]", re.sub(_NAME, "a", text)):
        raise AnswerError("characters that no such answer has")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise AnswerError(f"not an expression: {error}") from error


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant():
            return _number(node, text)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
            value = _value(inner, text)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _value(left, text), _value(right, text)
            if exponent.denominator != 1:
                raise AnswerError("a root")
            _check_size(base, exponent)
            return base ** int(exponent)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left, text), _value(right, text))
    raise AnswerError(f"{type(node).__name__} has no place in an answer")


def _number(node: ast.Constant, text: str) -> Fraction:
    source = ast.get_source_segment(text, node) or ""
    if not re.fullmatch(r"\d+|\d*\.\d*", source):
        raise AnswerError(f"the number {source[:20]!r}")
    return Fraction(source + "0" if source.endswith(".") else source)


def _check_size(base: Fraction | None, exponent: Fraction) -> None:
    """Raises AnswerError for a large exponent, or for a large power of a numeric base."""
    if max(abs(exponent), Fraction(exponent.denominator)) > MOST_EXPONENT:
        raise AnswerError("an exponent that is too large")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) if base else 0
    if bits * abs(exponent) > MOST_BITS:
        raise AnswerError("a number that is too large")


def is_program(text: str) -> bool:
    """Returns whether an answer contains program text, which mathematics never does."""
    return bool(_PROGRAM.search(text))


@lru_cache(maxsize=4096)
def exact(text: str) -> tuple[str, Fraction] | None:
    """Returns the kind ("decimal" or "fraction") and the value of a plain number, or None."""
    text = text.strip()
    if len(text) > MOST_DIGITS:
        return None
    while match := _WRAPPED.fullmatch(text):
        text = next(part for part in match.groups() if part is not None).strip()
    text = text.replace("\u2212", "-")
    if _DECIMAL.fullmatch(text) and text.lstrip("+-"):
        return "decimal", Fraction(Decimal(text.replace(",", "")))
    if match := _FRACTION.fullmatch(text):
        top = f"{match[1]}{match[2]}" if match[2] else match[4]
        bottom = int(match[3] or match[5])
        return ("fraction", Fraction(int(top), bottom)) if bottom else None
    return None


def canonical(text: str | None) -> str | None:
    """Returns the value of a plain number ("0.50" equals "1/2"), or else the text without case and
    white space.
    """
    if not text:
        return None
    text = hashed(text) or text
    plain = exact(text)
    return str(plain[1]) if plain else "".join(text.split()).casefold().strip(".$")
