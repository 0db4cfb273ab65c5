"""The verifiers that a data source names: one, or several with weights; and what those with a name
here give, before any of their code is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from compass_jax.config.errors import check
from compass_jax.config.named import absolute, check_name
from compass_jax.config.ranges import Name, Range
from compass_jax.rewards.verifiers.find import kinds

Weight = Annotated[float, Range(-1000, 1000)]
# a name, or ((name, weight), ...); a mapping {name: weight} is kept as the latter
Verifiers = str | tuple[tuple[Name, Weight], ...]
Options = tuple[tuple[str, int | float | str | bool | tuple], ...]

EXAMPLE = "'my_rewards:score'; or one of {}"
MOST_SUMS = 100_000  # different rewards of a weighted source that are looked through for a gap
NEAR = 1e-9  # sums of weights are compared within this


def pairs(verifier: Verifiers) -> tuple[tuple[str, float], ...]:
    """(name, weight) of each verifier; of an empty name none."""
    return ((verifier, 1.0),) * bool(verifier) if isinstance(verifier, str) else verifier


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
    answer = f"{last}, else in the last \\boxed{{...}}, else after the last ####" if tag else last
    for name, _ in pairs(getattr(source, "verifier", "") or source.task):
        if name in kinds():
            found.append(kinds()[name].looks_for.format(answer=answer, last=last, tag=tag))
        else:
            found.append(last if name == "reasoning_gym" else f"what {name} reads")
    return (
        "; ".join(dict.fromkeys(filter(None, found)))
        or "nothing: these verifiers judge the form alone"
    )


def check_verifiers(source: Any, key: str, others: tuple[str, ...] = ()) -> None:
    """Raises ConfigError where a source's `verifier` or `verifier_args` cannot be used.

    others: names beside the usual ones, the data set's own scorer for instance.
    """
    names, usual = [name for name, _ in pairs(source.verifier)], kinds()
    known = ", ".join(f"'{name}'" for name in (*usual, *others))
    check(bool(names), f"{key}.verifier is empty: name one of {known}, or a function")
    check_names(source.verifier, f"{key}.verifier", others)
    given = dict(source.verifier_args)
    mine = [usual[name] for name in names if name in usual]
    taken = {argument for kind in mine for argument in kind.takes}
    unknown = sorted(set(given) - taken) if set(names) <= {*usual, *others} else []
    check(
        not unknown,
        f"{key}.verifier_args: {', '.join(names)} take no {', '.join(unknown)}; they take"
        f" {', '.join(sorted(taken)) or 'none'}",
    )
    for kind in mine:
        complaint = kind.complaint(given)
        check(not complaint, f"{key}.verifier_args: {complaint}")


def check_names(verifiers: Verifiers, key: str, others: tuple[str, ...] = ()) -> None:
    """Raises ConfigError where `key` names what is no verifier, one twice, or one of weight 0;
    `others` as in `check_verifiers`.
    """
    names, known = [name for name, _ in pairs(verifiers)], (*kinds(), *others)
    for name, weight in pairs(verifiers):
        if name not in known:
            _check_own(name, key, known)
        check(weight != 0, f"{key}: {name!r} has weight 0; leave it out")
        check(names.count(name) == 1, f"{key} names {name!r} twice")


def _check_own(name: str, key: str, known: tuple[str, ...]) -> None:
    near = difflib.get_close_matches(name, known, n=1)
    meant = near[0] if near and ":" not in name else ""
    check(not meant, f"{key} = {name!r:.200}: did you mean {meant!r}?")
    check_name(name, key, EXAMPLE.format(", ".join(f"'{one}'" for one in known)))


class Spread(NamedTuple):
    """What a source's rewards can be."""

    low: float
    high: float
    gap: float  # between two that differ; NaN where nobody can say


def spread(source: Any) -> Spread | None:
    """The rewards of a source; None where one of its verifiers has no name in `kinds`, as a
    task's.
    """
    if not hasattr(source, "verifier"):
        return None
    given, sums, gap_known = dict(getattr(source, "verifier_args", ())), {0.0}, True
    low = high = 0.0
    for name, weight in pairs(source.verifier):
        if name not in kinds():
            return None
        steps = kinds()[name].steps(given)
        low, high = low + min(0.0, weight), high + max(0.0, weight)
        gap_known = gap_known and steps > 0 and len(sums) * (steps + 1) <= MOST_SUMS
        if gap_known:
            sums = {round(s + weight * i / steps, 9) for s in sums for i in range(steps + 1)}
    ordered = sorted(sums)
    gaps = [b - a for a, b in pairwise(ordered) if b - a > NEAR]
    return Spread(low, high, min(gaps) if gap_known and gaps else float("nan"))


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
