"""Equality of numbers that are too large to compute, by their residues modulo a large prime.

Sums, products, quotients, powers, factorials and binomial coefficients of integers are computed
modulo the prime. Any number that is not (a root, a logarithm, pi, a factorial beyond the bounds)
has a pseudo-random residue that depends only on its operation and on the residues of its operands.
It acts as a variable, so that two expressions with equal residues are equal as rational functions
of such numbers, except with a probability below 2^-150. The converse does not hold: expressions
with different residues may be equal by a relation that is not known here.

The prime is drawn at random in each process, so that no answer can differ by a multiple of it by
design.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

from compass_jax.rewards.verifiers.maths.evaluation import TooLarge, Undefined, evaluate
from compass_jax.rewards.verifiers.maths.expressions import Node, num

PRIME_BITS = 256
MAX_FACTORS = 2**17  # maximum factors of all factorials of a comparison
BLOCK = 2**15  # a large factorial is a variable times its last factors, fewer than this
MAX_TRIAL = 1_000  # bound of the prime factors that are found
_POSITIVE = frozenset(("add", "mul", "div", "factorial"))
_SYMMETRIC = frozenset(("max", "min", "gcd", "lcm"))
_E = Node("const", ("e",))
_BASES = {"ln": _E, "log": _E, "lg": num(10)}  # of logarithms without a base


def same_residue(left: Node, right: Node) -> bool:
    """Returns whether two expressions without variables are equal for certain. Raises Undefined if
    either has no value, and TooLarge if that cannot be computed in time.
    """
    residues = _Residues(_prime())
    return residues.value(left) == residues.value(right)


@cache
def _prime() -> int:
    """Returns this process's prime."""
    from sympy import nextprime  # type: ignore[import-untyped]

    return int(nextprime(1 << (PRIME_BITS - 1) | secrets.randbits(PRIME_BITS - 1)))


class _Residues:
    """The residues of the numbers of one comparison.

    Args:
        prime: the modulus.
    """

    def __init__(self, prime: int) -> None:
        self.prime = prime
        self.factors = 0  # of the factorials computed so far

    def value(self, node: Node) -> int:
        """Returns the residue of an expression. Raises Undefined."""
        kind, parts = node
        match kind:
            case "num":
                return self._quotient(parts[0].numerator, parts[0].denominator)
            case "add":
                return sum(map(self.value, parts)) % self.prime
            case "neg":
                return -self.value(parts[0]) % self.prime
            case "mul":
                return self.value(parts[0]) * self.value(parts[1]) % self.prime
            case "div":
                self._refuse_zero(parts[1])
                return self._quotient(*map(self.value, parts))
            case "pow":
                return self._power(*parts)
            case "exp":
                return self._power(_E, parts[0])
            case "ln" | "lg" | "log":
                base = parts[1] if len(parts) > 1 else _BASES[kind]
                return self._quotient(self._logarithm(parts[0]), self._logarithm(base))
            case "factorial" | "binom":
                return self._combinations(node)
            case "abs" if _is_positive(parts[0]):
                return self.value(parts[0])
        return self._atom(node)

    def _quotient(self, over: int, under: int) -> int:
        if under % self.prime == 0:
            raise Undefined("a division by 0")
        return over * pow(under, -1, self.prime) % self.prime

    def _refuse_zero(self, node: Node) -> None:
        """Raises Undefined for an expression without a value, or with the value 0."""
        try:
            if evaluate(node, {}) == 0:
                raise Undefined("a division by 0")
        except TooLarge:
            return

    def _hashed(self, *content: str | int) -> int:
        """Returns the residue of a number that cannot be computed."""
        digest = hashlib.sha512(repr((self.prime, content)).encode()).digest()
        return int.from_bytes(digest) % self.prime

    def _atom(self, node: Node) -> int:
        """Returns the exact value of an expression, or a residue for its operation."""
        if (known := _exact(node)) is not None:
            return self.value(num(known))
        kind, parts = node
        residues = [self.value(part) if isinstance(part, Node) else part for part in parts]
        return self._hashed(kind, *(sorted(residues) if kind in _SYMMETRIC else residues))

    def _combinations(self, node: Node) -> int:
        """Returns the residue of a factorial or a binomial coefficient."""
        numbers = [_exact(part) for part in node.parts]
        if any(x is None or x.denominator > 1 or x < 0 for x in numbers):
            return self._atom(node)
        n, k = int(numbers[0]), int(numbers[-1])  # type: ignore[arg-type]
        if node.kind == "factorial":
            return self._factorial(n)
        k = min(k, n - k)
        if k < 0:
            return 0
        if k <= BLOCK:
            return self._quotient(self._product(n - k + 1, n), self._product(1, k))
        return self._quotient(self._factorial(n), self._factorial(k) * self._factorial(n - k))

    def _factorial(self, n: int) -> int:
        first = n - n % BLOCK if n > 2 * BLOCK else 0
        before = self._hashed("factorial", first) if first else 1
        return before * self._product(first + 1, n) % self.prime

    def _product(self, first: int, last: int) -> int:
        """Returns the residue of the product of consecutive numbers. Raises TooLarge for too
        many.
        """
        self.factors += max(0, last - first + 1)
        if self.factors > MAX_FACTORS:
            raise TooLarge("too many factors")
        product = 1
        for start in range(first, last + 1, 32):
            product = product * math.prod(range(start, min(start + 32, last + 1))) % self.prime
        return product

    def _power(self, base: Node, exponent: Node) -> int:
        known = _exact(exponent)
        if known is not None and known.denominator == 1:
            if known <= 0:
                self._refuse_zero(base)
            return self._raised(self.value(base), int(known)) if known else 1
        if not _is_positive(base) or _is_complex(exponent):
            return self._atom(Node("pow", (base, exponent)))
        product = 1
        for factor, degrees in _factors(base):
            product = product * self._factor_power(factor, [*degrees, exponent]) % self.prime
        return product

    def _raised(self, residue: int, exponent: int) -> int:
        power = pow(residue, abs(exponent) % (self.prime - 1), self.prime)
        return power if exponent > 0 else self._quotient(1, power)

    def _factor_power(self, factor: Node, degrees: list[Node]) -> int:
        """Returns the residue of a factor raised to a product of exponents. Roots of equal numbers
        have equal residues.
        """
        exponent = degrees[0]
        for degree in degrees[1:]:
            exponent = Node("mul", (exponent, degree))
        residue, known = self.value(factor), _exact(exponent)
        if known is None:
            return self._hashed("pow", residue, self.value(exponent))
        quotient, part = divmod(known.numerator, known.denominator)
        power = self._raised(residue, quotient) if quotient else 1
        if part:
            power *= self._raised(self._hashed("root", residue, known.denominator), part)
        return power % self.prime

    def _logarithm(self, node: Node) -> int:
        """Returns the residue of a natural logarithm."""
        if not _is_positive(node):
            return self._atom(Node("ln", (node,)))
        total = 0
        for factor, degrees in _factors(node):
            term = 1 if factor == _E else self._hashed("ln", self.value(factor))
            for degree in degrees:
                term = term * self.value(degree) % self.prime
            total += term
        return total % self.prime


def _exact(node: Node) -> Fraction | None:
    """Returns the exact value of an expression, or None. Raises Undefined if it has no value."""
    try:
        value = evaluate(node, {})
    except TooLarge:
        return None
    return value if isinstance(value, Fraction) else None


def _is_complex(node: Node) -> bool:
    return any(part == Node("const", ("i",)) for part in node.walk())


def _is_positive(node: Node) -> bool:
    """Returns whether an expression is positive by its form."""
    kind, parts = node
    if kind == "num":
        return parts[0] > 0
    if kind == "const":
        return parts[0] != "i"
    if kind == "pow":
        return _is_positive(parts[0]) and not _is_complex(parts[1])
    if kind == "exp":
        return not _is_complex(parts[0])
    return kind in _POSITIVE and all(map(_is_positive, parts))


def _factors(node: Node) -> Iterator[tuple[Node, list[Node]]]:
    """Yields the factors of a positive number, each with exponents whose product is its power."""
    kind, parts = node
    if kind == "num":
        for part, sign in zip(parts[0].as_integer_ratio(), (1, -1)):
            yield from ((num(p), [num(sign * count)]) for p, count in _divisors(part))
    elif kind in ("mul", "div"):
        yield from _factors(parts[0])
        for factor, degrees in _factors(parts[1]):
            yield factor, degrees if kind == "mul" else [*degrees, num(-1)]
    elif kind == "pow":
        yield from ((factor, [*degrees, parts[1]]) for factor, degrees in _factors(parts[0]))
    elif kind == "exp":
        yield _E, [parts[0]]
    else:
        yield node, [num(1)]


def _divisors(n: int) -> Iterator[tuple[int, int]]:
    """Yields the prime factors up to MAX_TRIAL with their multiplicities, then the cofactor."""
    for divisor in (2, *range(3, MAX_TRIAL, 2)):
        if n == 1:
            return
        count = 0
        while n % divisor == 0:
            n, count = n // divisor, count + 1
        if count:
            yield divisor, count
    if n > 1:
        yield n, 1
