"""Worked solutions of some reasoning-gym tasks: short chains of thought with one operation per
step.

Each function takes a dataset's entry and returns the lines before the answer; `worked_solution`
adds `<answer>...</answer>`. They are meant for a cold start: a small model learns the form from
them before RL.
"""

from __future__ import annotations

from collections.abc import Callable

from compass_jax.base.aliases import JsonObject

Entry = JsonObject


def _chain_sum(entry: Entry) -> list[str]:
    """Returns the steps of 6 + 2 - 4: "6 + 2 = 8", "8 - 4 = 4"."""
    first, *rest = entry["metadata"]["expression"].split(" ")
    total, lines = int(first), []
    for sign, term in zip(rest[::2], rest[1::2]):
        result = total + int(term) if sign == "+" else total - int(term)
        lines.append(f"{total} {sign} {term} = {result}")
        total = result
    return lines


def _products(entry: Entry) -> list[str]:
    """Returns the steps of 12 * 34: the left factor times each digit, then the sum."""
    first, *rest = entry["metadata"]["expression"].split(" * ")
    total, lines = int(first), []
    for factor in map(int, rest):
        sign = -1 if factor < 0 else 1
        digits = str(abs(factor))
        parts = [
            sign * int(digit) * 10 ** (len(digits) - 1 - i)
            for i, digit in enumerate(digits)
            if digit != "0"
        ] or [0]
        lines += [f"{total} * {part} = {total * part}" for part in parts]
        product = total * parts[0]
        for part in parts[1:]:
            lines.append(f"{product} + {total * part} = {product + total * part}")
            product += total * part
        total = product
    return lines


def _count_bits(entry: Entry) -> list[str]:
    """Returns each halving with the count of ones so far: "6 0", "3 1", "1 2"."""
    number, ones, lines = entry["metadata"]["number"], 0, []
    while number:
        ones += number % 2
        lines.append(f"{number} {ones}")
        number //= 2
    return lines


def _leg_counting(entry: Entry) -> list[str]:
    """Returns the legs of each kind of animal, then their sum: "duck: 3 * 2 = 6", "6 + 4 = 10"."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    counts = entry["metadata"]["animals"].items()
    lines = [f"{name}: {n} * {ANIMALS[name]} = {n * ANIMALS[name]}" for name, n in counts]
    if len(lines) > 1:
        terms = " + ".join(str(n * ANIMALS[name]) for name, n in counts)
        lines.append(f"{terms} = {entry['answer']}")
    return lines


_STEPS: dict[str, Callable[[Entry], list[str]]] = {
    "chain_sum": _chain_sum,
    "products": _products,
    "count_bits": _count_bits,
    "leg_counting": _leg_counting,
}


def known_datasets() -> tuple[str, ...]:
    """Returns the names of the datasets with worked solutions."""
    return tuple(sorted(_STEPS))


def worked_solution(dataset_name: str, entry: Entry) -> str:
    """Returns the steps to an entry's answer, one a line, and the answer in `<answer>` tags."""
    return "\n".join([*_STEPS[dataset_name](entry), f"<answer>{entry['answer']}</answer>"])
