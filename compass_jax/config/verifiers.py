"""The verifiers that a data source names: one, or several with weights; and what those with a name
here give, before any of their code is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from compass_jax.config.errors import check
from compass_jax.config.named import absolute, check_name
from compass_jax.config.ranges import Name, Range

Weight = Annotated[float, Range(-1000, 1000)]
# a name, or ((name, weight), ...); a mapping {name: weight} is kept as the latter
Verifiers = str | tuple[tuple[Name, Weight], ...]
Options = tuple[tuple[str, int | float | str | bool | tuple], ...]

EXAMPLE = "'my_rewards:score'; or one of {}"
MOST_SUMS = 100_000  # different rewards of a weighted source that are looked through for a gap
NEAR = 1e-9  # sums of weights are compared within this


class Usual(NamedTuple):
    """A verifier with a name: its rewards are in [0, 1], and at least `gap` apart."""

    answer: bool  # it compares with the row's reference
    takes: tuple[str, ...] = ()  # arguments, of `verifier_args` or columns of the row


USUAL = {
    "math": Usual(True),
    "exact": Usual(True),
    "choice": Usual(True, ("choices",)),
    "json": Usual(False),
    "regex": Usual(False, ("pattern",)),
    "format": Usual(False, ("think_tag",)),
    "length": Usual(False, ("most_chars", "free_chars")),
}


def pairs(verifier: Verifiers) -> tuple[tuple[str, float], ...]:
    """(name, weight) of each verifier."""
    return ((verifier, 1.0),) if isinstance(verifier, str) else verifier


def settled(value: Any) -> Any:
    """A verifier as a configuration keeps it: a mapping as pairs, paths of files absolute."""
    value = tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(value, tuple):
        return absolute(value)
    return tuple((absolute(x[0]), *x[1:]) if isinstance(x, tuple) and x else x for x in value)


def looked_for(source: Any, tag: str) -> str:
    """Where the verifiers of a source look for the answer in a response, in words."""
    found = []
    last = f"the text in the last <{tag}>...</{tag}>" if tag else "the whole response"
    for name, _ in pairs(getattr(source, "verifier", "") or source.task):
        if name in ("math", "exact", "choice"):
            others = f"{last}, else in the last \\boxed{{...}}, else after the last ####"
            letter = "; else a letter after 'the answer is'" if name == "choice" else ""
            found.append((others if tag else last) + letter)
        elif name == "json":
            found.append(f"JSON: {last}, else in a block between ``` marks, else all of it")
        elif name == "reasoning_gym":
            found.append(last)
        elif name not in USUAL:
            found.append(f"what {name} reads")
    return "; ".join(dict.fromkeys(found)) or "nothing: these verifiers judge the form alone"


def check_verifiers(source: Any, key: str, others: tuple[str, ...] = ()) -> None:
    """Raises ConfigError where a source's `verifier` or `verifier_args` cannot be used.

    others: names beside the usual ones, the data set's own scorer for instance.
    """
    names = [name for name, _ in pairs(source.verifier)]
    known = ", ".join(f"'{name}'" for name in (*USUAL, *others))
    check(bool(names), f"{key}.verifier is empty: name one of {known}, or a function")
    for name, weight in pairs(source.verifier):
        if name not in (*USUAL, *others):
            check_name(name, f"{key}.verifier", EXAMPLE.format(known))
        check(weight != 0, f"{key}.verifier: {name!r} has weight 0; leave it out")
        check(names.count(name) == 1, f"{key}.verifier names {name!r} twice")
    given = dict(source.verifier_args)
    taken = {name for usual in names for name in USUAL.get(usual, Usual(False)).takes}
    unknown = sorted(set(given) - taken) if set(names) <= {*USUAL, *others} else []
    check(
        not unknown,
        f"{key}.verifier_args: {', '.join(names)} take no {', '.join(unknown)}; they take"
        f" {', '.join(sorted(taken)) or 'none'}",
    )
    _check_usual(names, given, f"{key}.verifier_args")


def _check_usual(names: list[str], given: dict[str, Any], key: str) -> None:
    if "regex" in names and "pattern" in given:
        try:
            re.compile(given["pattern"])
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            check(False, f"{key}: pattern = {given['pattern']!r:.100}: {error}")
    if "length" in names and "most_chars" in given:
        most, free = given["most_chars"], given.get("free_chars", given["most_chars"])
        numbers = all(isinstance(x, int) and not isinstance(x, bool) for x in (most, free))
        check(
            numbers and 0 <= free <= most and most > 0,
            f"{key}: most_chars = {most!r:.40} and free_chars = {free!r:.40} must be whole numbers,"
            " free_chars at most most_chars",
        )


class Spread(NamedTuple):
    """What a source's rewards can be."""

    low: float
    high: float
    gap: float  # between two that differ; NaN where nobody can say


def spread(source: Any) -> Spread | None:
    """The rewards of a source; None where one of its verifiers is not a usual one."""
    given, sums, gap_known = dict(getattr(source, "verifier_args", ())), {0.0}, True
    low = high = 0.0
    for name, weight in pairs(getattr(source, "verifier", "")):
        if name not in USUAL:
            return None
        steps = _steps(name, given)
        low, high = low + min(0.0, weight), high + max(0.0, weight)
        gap_known = gap_known and len(sums) * (steps + 1) <= MOST_SUMS
        if gap_known:
            sums = {round(s + weight * i / steps, 9) for s in sums for i in range(steps + 1)}
    ordered = sorted(sums)
    gaps = [b - a for a, b in pairwise(ordered) if b - a > NEAR]
    return Spread(low, high, min(gaps) if gap_known and gaps else float("nan"))


def _steps(name: str, given: dict[str, Any]) -> int:
    """Equal steps between a usual verifier's rewards 0 and 1; every row may have its own length
    limits where none are given.
    """
    if name != "length":
        return 1
    if "most_chars" not in given:
        return MOST_SUMS
    return max(1, given["most_chars"] - given.get("free_chars", given["most_chars"]))


def check_rewards(sources: list[tuple[str, Any]], rewards: Any, shaping: float) -> None:
    """Raises ConfigError where no answer can count as right or as wrong, or where the rewards of a
    source are closer than `rewards.smallest_gap` says and `shaping` (the penalties' sum) relies on
    it. `sources` are those of `DataConfig.keyed_sources`.
    """
    for where, source in sources:
        key, found = f"{where}.verifier", spread(source)
        if found is None:
            continue
        check(
            found.high >= rewards.right_at - NEAR,
            f"{key} gives at most {found.high:g}, and rewards.right_at = {rewards.right_at:g}: no"
            " answer could count as right; raise the weights or lower rewards.right_at",
        )
        check(
            found.low <= rewards.wrong_at + NEAR,
            f"{key} gives at least {found.low:g}, and rewards.wrong_at = {rewards.wrong_at:g}: no"
            " answer could count as wrong; raise rewards.wrong_at",
        )
        check(
            not shaping or not found.gap < rewards.smallest_gap - NEAR,
            f"{key} gives rewards {found.gap:g} apart, and rewards.smallest_gap ="
            f" {rewards.smallest_gap:g}: a penalty of rl.shaping could put the better answer below"
            f" the other; set rewards.smallest_gap to {found.gap:g}",
        )
