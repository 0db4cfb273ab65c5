"""Evaluation of expressions.

Values are exact rational numbers if the operations allow it, and otherwise mpmath numbers of 60
digits, or of the digits that `precision` sets. A `Fraction` is always exact. The value of an
undefined function (`f(x)`) depends only on its name and arguments. Each operation checks the size
of its result before it computes it, so that every evaluation is fast.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from functools import lru_cache

from compass_jax.base.aliases import Value
from compass_jax.base.errors import CompassError
from compass_jax.rewards.verifiers.maths.expressions import Node, is_constant

MAX_BITS = 100_000  # maximum size of an exact number
MAX_MAGNITUDE = 2**40  # maximum binary exponent of a number
MAX_FACTORIAL = 5_000  # largest argument with an exact factorial
MAX_ARGUMENT = 200  # maximum binary exponent of a function's argument
MAX_CHOSEN = 50  # largest k with an exact binomial coefficient of a fraction and k
MAX_GAMMA_BITS = 768  # maximum precision of the factorial of a number that is not whole
DIGITS = 60

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


def size(value: Number) -> int:
    """Returns the bits of a number: of its numerator or denominator, or of its exponent."""
    if isinstance(value, Fraction):
        return max(value.numerator.bit_length(), value.denominator.bit_length())
    return abs(int(_mp().mag(value))) if value else 0


def precision(bits: int) -> AbstractContextManager:
    """Returns a context in which inexact numbers have at least `bits` bits."""
    return _mp().workprec(max(bits, _mp().prec))


def distance(a: Number, b: Number) -> tuple[int, int]:
    """Returns the binary exponents of a difference and of the larger of the two numbers. The
    exponent of 0 is below all others.
    """
    mp, values = _mp(), (inexact(a), inexact(b))
    exponents = (mp.mag(values[0] - values[1]), max(map(mp.mag, values)))
    return tuple(-(2**60) if x == mp.ninf else int(x) for x in exponents)  # type: ignore[return-value]


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
    if isinstance(value, mp.mpc) and abs(value.imag) <= mp.ldexp(abs(value.real), 53 - mp.prec):
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
        if kind in _WHOLE and _is_small(kind, values):
            return _checked(Fraction(_WHOLE[kind](*map(int, values))))
        if kind == "binom" and values[1].denominator == 1 and 0 <= values[1] <= MAX_CHOSEN:
            factors = ((values[0] - i) / (i + 1) for i in range(int(values[1])))
            return _checked(math.prod(factors, start=Fraction(1)))
    mp = _mp()
    values = [inexact(value) for value in values]
    if kind == "exp":
        return _checked(_power(+mp.e, *values))
    if kind in ("factorial", "binom") and (
        mp.prec > MAX_GAMMA_BITS or any(mp.mag(value) > 30 for value in values)
    ):
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


def _is_small(kind: str, values: Sequence[Fraction]) -> bool:
    """Returns whether a function of whole numbers is within MAX_BITS, or nearly so."""
    if any(value.denominator > 1 for value in values):
        return False
    if kind == "binom" and 0 <= values[1] <= values[0]:
        return min(values[1], values[0] - values[1]) * size(values[0]) <= MAX_BITS
    return kind in ("gcd", "lcm") or 0 <= values[0] <= MAX_FACTORIAL


def _sum(*terms: Value) -> Number:
    """Returns a sum; 0 if it is below the rounding error of its terms."""
    mp = _mp()
    total = mp.fsum(terms)
    largest = max(abs(term) for term in terms)
    return mp.zero if abs(total) <= mp.ldexp(largest, 27 - mp.prec) else total


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
        return mp.zero
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


def evaluate(
    node: Node, point: Mapping[str, Number], real: bool = False, sizes: list[int] | None = None
) -> Number:
    """Returns the value of an expression at a point. Raises Undefined if there is no value.

    With `real`, every subexpression must have a real value. The sizes of all their values are added
    to `sizes`.
    """
    try:
        return _evaluate(node, point, real, [] if sizes is None else sizes)
    except (ZeroDivisionError, OverflowError, ValueError, TypeError) as error:
        raise Undefined(str(error)) from error


def _evaluate(node: Node, point: Mapping[str, Number], real: bool, sizes: list[int]) -> Number:
    kind, parts = node
    if kind == "num":
        value = parts[0]
    elif kind == "sym":
        value = point[parts[0]]
    elif kind == "const":
        mp = _mp()
        value = {"pi": +mp.pi, "e": +mp.e, "i": mp.mpc(0, 1)}[parts[0]]
    elif kind == "unknown":
        value = _arbitrary(parts[0], [_evaluate(part, point, real, sizes) for part in parts[1:]])
    else:
        value = apply(kind, [_evaluate(part, point, real, sizes) for part in parts])
    if real and not is_real(value):
        raise Undefined("a value that is not real")
    sizes.append(size(value))
    return value


def _arbitrary(name: str, values: Sequence[Number]) -> Number:
    """Returns a pseudo-random value that depends only on a function's name and arguments. It is
    inexact, because the arguments are rounded.
    """
    mp = _mp()
    arguments = [mp.nstr(inexact(value), mp.dps // 2) for value in values]
    digest = hashlib.sha256(repr((name, arguments)).encode()).digest()
    return mp.mpf(int.from_bytes(digest[:4]) % 9973 + 2) / (digest[4] % 30 + 1)


@lru_cache(maxsize=2048)
def constant(node: Node) -> Number | None:
    """Returns the value of an expression without variables, or None."""
    try:
        return evaluate(node, {}) if is_constant(node) else None
    except Undefined:
        return None
