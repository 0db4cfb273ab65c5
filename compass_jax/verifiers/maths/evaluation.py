"""Evaluation of expressions, and numerical equality of two expressions.

Two expressions are equal if their values agree at several points. Values are exact rational numbers
if the operations allow it, and otherwise mpmath numbers of 60 digits. The value of an undefined
function (`f(x)`) depends only on its name and arguments. Each operation checks the size of its
result before it computes it, so that every evaluation is fast.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import chain

from compass_jax.aliases import Value
from compass_jax.errors import CompassError
from compass_jax.verifiers.maths.expressions import Node, is_constant, variables

MAX_BITS = 100_000  # maximum size of an exact number
MAX_MAGNITUDE = 2**40  # maximum binary exponent of a number
MAX_FACTORIAL = 5_000  # largest argument with an exact factorial
MAX_ARGUMENT = 200  # maximum binary exponent of a function's argument
DIGITS = 60
POINTS = 8
FURTHER_POINTS = 40  # of expressions that are real at fewer than 2 of the first points
# odd, so that an integer keeps its parity
_SCALES = (Fraction(1), Fraction(1, 10), Fraction(3), Fraction(21), Fraction(201))
INTEGERS = frozenset("kmn")  # variables that stand for integers

Number = Value  # Fraction, mpmath.mpf or mpmath.mpc


class Undefined(CompassError, ArithmeticError):
    """An expression has no value at a point, or one beyond the bounds."""


class TooLarge(Undefined):
    """A value is beyond the bounds."""


@lru_cache(maxsize=1)
def _mp() -> Value:
    import mpmath  # type: ignore[import-untyped]

    context = mpmath.mp.clone()
    context.dps = DIGITS
    return context


def inexact(value: Number) -> Value:
    """Returns a number as an mpmath number."""
    if isinstance(value, Fraction):
        return _mp().mpf(value.numerator) / value.denominator
    return value


def is_real(value: Number) -> bool:
    """Returns whether a value is a real number."""
    return isinstance(value, Fraction) or not isinstance(value, _mp().mpc) or value.imag == 0


def close(a: Number, b: Number) -> bool:
    """Returns whether two values are the same number."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = inexact(a), inexact(b)
    return bool(abs(a - b) <= max(abs(a), abs(b)) * _mp().mpf(10) ** -40)


def as_fraction(value: Number) -> Fraction:
    """Returns a real value as a fraction, rounded to 50 digits if it is inexact."""
    if isinstance(value, Fraction):
        return value
    magnitude = _mp().mag(value) if value else 0
    if abs(magnitude) > 4 * MAX_BITS:  # beyond all bounds
        return Fraction(0) if magnitude < 0 else Fraction(2) ** (2 * MAX_BITS)
    return Fraction(_mp().nstr(_mp().re(value), 50))


def _checked(value: Number) -> Number:
    """Returns a value within the bounds, without a negligible imaginary part, or raises."""
    if isinstance(value, Fraction):
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        return value if bits <= MAX_BITS else inexact(value)
    mp = _mp()
    if not mp.isfinite(value):
        raise Undefined("no finite value")
    if isinstance(value, mp.mpc) and abs(value.imag) <= abs(value.real) * mp.mpf(10) ** -45:
        value = value.real
    if value and abs(mp.mag(value)) > MAX_MAGNITUDE:
        raise TooLarge("a number beyond the bounds")
    return value


_EXACT: dict[str, Callable[..., Value]] = {
    "add": lambda *terms: sum(terms, Fraction(0)), "neg": operator.neg, "mul": operator.mul,
    "div": operator.truediv, "abs": abs, "floor": math.floor, "ceil": math.ceil, "max": max,
    "min": min,
}  # fmt: skip
_WHOLE: dict[str, Callable[..., int]] = {
    "factorial": math.factorial, "binom": math.comb, "gcd": math.gcd, "lcm": math.lcm,
}  # fmt: skip
_MPMATH = {
    "ln": "log", "lg": "log10", "sgn": "sign", "binom": "binomial",
    **{f"arc{name}": f"a{name}" for name in str.split("sin cos tan cot sinh cosh tanh")},
    **{name: name for name in str.split("sin cos tan cot sec csc sinh cosh tanh coth log floor")},
    "ceil": "ceil", "factorial": "factorial",
}  # fmt: skip


def apply(kind: str, values: Sequence[Number]) -> Number:
    """Returns the value of an operation. Raises Undefined, or an arithmetic error."""
    if kind == "pow":
        return _checked(_power(*values))
    if all(isinstance(value, Fraction) for value in values):
        if kind in _EXACT:
            return _checked(Fraction(_EXACT[kind](*values)))
        small = kind in ("gcd", "lcm") or 0 <= values[0] <= MAX_FACTORIAL
        if kind in _WHOLE and small and all(value.denominator == 1 for value in values):
            return _checked(Fraction(_WHOLE[kind](*map(int, values))))
    mp = _mp()
    values = [inexact(value) for value in values]
    if kind == "exp":
        return _checked(_power(+mp.e, *values))
    if kind in ("factorial", "binom") and any(mp.mag(value) > 30 for value in values):
        raise TooLarge(f"a {kind} beyond the bounds")
    logarithm = kind in ("ln", "log", "lg")
    if logarithm and not all(values):
        raise Undefined("a logarithm of 0")
    if kind not in _EXACT and not logarithm and mp.mag(values[0]) > MAX_ARGUMENT:
        raise TooLarge(f"an argument of {kind} beyond the bounds")
    if kind in _MPMATH:
        return _checked(getattr(mp, _MPMATH[kind])(*values))
    if kind not in _EXACT:
        raise Undefined(f"{kind} of numbers that are not whole")
    return _checked((_sum if kind == "add" else _EXACT[kind])(*values))


def _sum(*terms: Value) -> Number:
    """Returns a sum; exactly 0 if it is below the rounding error of its terms."""
    mp = _mp()
    total = mp.fsum(terms)
    largest = max(abs(term) for term in terms)
    return Fraction(0) if abs(total) <= largest * mp.mpf(10) ** (8 - DIGITS) else total


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, Fraction):
        n, degree = exponent.numerator, exponent.denominator
        if 1 < degree <= 100:
            base = _root(base, degree)
        if degree <= 100 and isinstance(base, Fraction):
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            # The power of a rational number has about |n| times as many bits.
            if abs(n) * bits <= MAX_BITS:
                return base**n
        exponent = Fraction(n) if degree <= 100 else exponent
    mp = _mp()
    base, exponent = inexact(base), inexact(exponent)
    if base == 0:
        if mp.re(exponent) <= 0:
            raise Undefined("a power of 0")
        return Fraction(0)
    if mp.mag(exponent) > 40 or mp.mag(mp.log(base)) + mp.mag(exponent) > 41:
        raise TooLarge("an exponent beyond the bounds")
    return mp.power(base, exponent)


def _root(value: Number, degree: int) -> Number:
    """Returns a root; the real root of a negative number if the degree is odd."""
    mp = _mp()
    if degree % 2 and is_real(value) and value < 0:
        return -_root(-value, degree)
    if isinstance(value, Fraction) and value >= 0:
        parts = [int(mp.nint(mp.root(part, degree))) for part in value.as_integer_ratio()]
        if parts[1] and Fraction(*parts) ** degree == value:
            return Fraction(*parts)
    return mp.root(inexact(value), degree)


def evaluate(node: Node, point: Mapping[str, Number], real: bool = False) -> Number:
    """Returns the value of an expression at a point. Raises Undefined if there is no value.

    With `real`, every subexpression must have a real value.
    """
    try:
        return _evaluate(node, point, real)
    except (ZeroDivisionError, OverflowError, ValueError, TypeError) as error:
        raise Undefined(str(error)) from error


def _evaluate(node: Node, point: Mapping[str, Number], real: bool) -> Number:
    kind, parts = node
    if kind == "num":
        return parts[0]
    if kind == "sym":
        return point[parts[0]]
    if kind == "const":
        mp = _mp()
        value = {"pi": +mp.pi, "e": +mp.e, "i": mp.mpc(0, 1)}[parts[0]]
    elif kind == "unknown":
        value = _arbitrary(parts[0], [_evaluate(part, point, real) for part in parts[1:]])
    else:
        value = apply(kind, [_evaluate(part, point, real) for part in parts])
    if real and not is_real(value):
        raise Undefined("a value that is not real")
    return value


def _arbitrary(name: str, values: Sequence[Number]) -> Fraction:
    """Returns a pseudo-random value that depends only on a function's name and arguments."""
    arguments = [_mp().nstr(inexact(value), 30) for value in values]
    digest = hashlib.sha256(repr((name, arguments)).encode()).digest()
    return Fraction(int.from_bytes(digest[:4]) % 9973 + 2, digest[4] % 30 + 1)


@lru_cache(maxsize=2048)
def constant(node: Node) -> Number | None:
    """Returns the value of an expression without variables, or None."""
    try:
        return evaluate(node, {}) if is_constant(node) else None
    except Undefined:
        return None


@lru_cache(maxsize=1024)
def _coordinate(name: str, index: int) -> Fraction:
    digest = hashlib.sha256(f"{index} {name}".encode()).digest()
    if name in INTEGERS:
        # Even and odd numbers alternate, which tells (-1)^n from 1.
        return Fraction(2 + (digest[0] % 12) * 2 + index % 2)
    value = Fraction(digest[0] % 89 + 11, digest[1] % 23 + 17)
    # The first half of the points is positive, for functions that are defined only there.
    return -value if index >= POINTS // 2 and digest[2] % 3 else value


def points(*nodes: Node) -> Iterator[dict[str, Fraction]]:
    """Yields the points at which expressions are compared; one if they have no variables."""
    names = sorted(set[str]().union(*map(variables, nodes)))
    for index in range(POINTS if names else 1):
        yield {name: _coordinate(name, index) for name in names}


def _further_points(*nodes: Node) -> Iterator[dict[str, Fraction]]:
    """Yields points of other magnitudes, half of them positive, such as those where x > 10."""
    names = sorted(set[str]().union(*map(variables, nodes)))
    for index in range(POINTS, POINTS + FURTHER_POINTS if names else POINTS):
        scale = _SCALES[index % len(_SCALES)]
        values = {name: _coordinate(name, index) for name in names}
        for name, value in values.items():
            scaled = value if name in INTEGERS and scale < 1 else value * scale
            values[name] = abs(scaled) if index // len(_SCALES) % 2 else scaled
        yield values


def equal(left: Node, right: Node) -> bool:
    """Returns whether two expressions have the same values."""
    values = [constant(left), constant(right)]
    if None not in values:
        return close(*values)
    agreed = count = 0
    # Without i in either expression, points at which a part is not real are skipped.
    real = all(part != Node("const", ("i",)) for node in (left, right) for part in node.walk())
    for point in chain(points(left, right), _further_points(left, right)):
        if count == POINTS and agreed > 1:
            break
        count += 1
        try:
            values = [evaluate(node, point, real and bool(point)) for node in (left, right)]
        except Undefined as error:
            if isinstance(error, TooLarge) and count <= POINTS:
                return False
            continue
        if not close(*values):
            return False
        agreed += 1
    return agreed >= min(count, 2)


def proportional(left: Node, right: Node) -> int:
    """Returns the sign of the constant ratio of two expressions; 0 if the ratio is not constant."""
    ratio = None
    for point in points(left, right):
        try:
            a, b = evaluate(left, point), evaluate(right, point)
            if not a or not b:
                return 0
            value = apply("div", [a, b])
        except Undefined:
            continue
        if ratio is not None and not close(ratio, value):
            return 0
        ratio = value
    return 0 if ratio is None or not is_real(ratio) else 1 if ratio > 0 else -1
