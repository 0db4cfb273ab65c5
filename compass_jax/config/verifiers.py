"""The verifiers that a data source names: one, or several with weights; and what those with a name
here give, before any of their code is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from compass_jax.config.errors import check
from compass_jax.config.named import check_name, load
from compass_jax.config.ranges import Name, Range
from compass_jax.verifiers.find import kinds

Weight = Annotated[float, Range(-1000, 1000)]
# a name, or ((name, weight), ...); a mapping {name: weight} is kept as the latter
Verifiers = str | tuple[tuple[Name, Weight], ...]
Options = tuple[tuple[str, int | float | str | bool | tuple], ...]

JUDGE = "judge"  # beside those of `kinds`: the trainer's process asks it (rewards/judging.py)
VERDICT = "verdict"  # its rows are preferences, each asked in both orders (data/preferences.py)
JUDGE_STEPS = 2  # Worse, Tie, Better
EXAMPLE = "'my_rewards:score'; or one of {}"
MOST_SUMS = 100_000  # different rewards of a weighted source that are looked through for a gap
NEAR = 1e-9  # sums of weights are compared within this


def pairs(verifier: Verifiers) -> tuple[tuple[str, float], ...]:
    """(name, weight) of each verifier; of an empty name none."""
    return ((verifier, 1.0),) * bool(verifier) if isinstance(verifier, str) else verifier


def looked_for(source: Any, tag: str) -> str:
    """Describes the place in a response where the verifiers of a source search the answer."""
    found = []
    last = f"the text in the last <{tag}>...</{tag}>" if tag else "the whole response"
    answer = f"{last}, else in the last \\boxed{{...}}, else after the last ####" if tag else last
    for name, _ in pairs(getattr(source, "verifier", "") or source.task):
        if name in kinds():
            found.append(kinds()[name].looks_for.format(answer=answer, last=last, tag=tag))
        else:
            others = {"reasoning_gym": last, JUDGE: "the whole response, by the judge"}
            found.append(others.get(name, f"what {name} reads"))
    return (
        "; ".join(dict.fromkeys(filter(None, found)))
        or "nothing: these verifiers judge the form alone"
    )


def check_verifiers(source: Any, key: str, others: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for an unusable `verifier` or `verifier_args` of a source.

    others: names beside the usual ones, such as the data set's own scorer.
    """
    names, usual = [name for name, _ in pairs(source.verifier)], kinds()
    others = (*others, JUDGE)
    known = ", ".join(f"'{name}'" for name in (*usual, *others))
    check(bool(names), f"{key}.verifier is empty: name one of {known}, or a function")
    check_names(source.verifier, f"{key}.verifier", others)
    columns = {getattr(source, f"{name}_field", "auto") for name in ("prompt", "answer")}
    check(
        VERDICT not in names or columns == {"auto"},
        f"{key}: with verifier = {VERDICT!r} the rows are preferences, whose columns have fixed"
        " names (docs/howto/judge.md); leave prompt_field and answer_field out",
    )
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
    """Raises ConfigError for an unknown or repeated verifier in `key`, or one of weight 0; `others`
    as in `check_verifiers`.
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
    """What rewards can be."""

    low: float
    high: float
    gap: float  # between two that differ; where rows decide it, the most that it can be


# 0 and 1, and what rows put between them
ENDS = Spread(0.0, 1.0, 1.0)


def spread(source: Any) -> Spread | None:
    """The rewards of a source; None where one of its verifiers is neither the judge nor of `kinds`,
    as a task's.
    """
    named = pairs(getattr(source, "verifier", ""))
    if not named or any(name not in (*kinds(), JUDGE) for name, _ in named):
        return None
    given = dict(source.verifier_args)
    return summed([(_of_kind(name, given), weight) for name, weight in named])


def smallest_gap(sources: list[tuple[str, Any]], rewards: Any) -> tuple[float, str]:
    """How much two rewards that differ do so at least, and the setting that says it: that of
    `rewards`, or the source of `sources` (of `DataConfig.keyed_sources`) whose verifiers give the
    closest ones. A verifier whose rewards depend on its row counts with 0 and 1.

    Raises ConfigError where a function or task cannot be imported, or what it says cannot be meant.
    """
    if rewards.smallest_gap is not None:
        return rewards.smallest_gap, "rewards.smallest_gap"
    found = [(summed(_spreads(source, where)).gap, where) for where, source in sources]
    return min(found, default=(ENDS.gap, "rewards.smallest_gap"))


def _spreads(source: Any, where: str) -> list[tuple[Spread, float]]:
    """The rewards of each verifier of a source, and its weight; functions are imported."""
    given, key = dict(getattr(source, "verifier_args", ())), f"{where}.verifier"
    verifiers: Any = getattr(source, "verifier", None)
    if verifiers is None:
        key = f"{where}.task"
        verifiers = getattr(load(source.task, key), "verify", "")
        verifiers = tuple(verifiers.items()) if isinstance(verifiers, Mapping) else verifiers
    weighted = verifiers if isinstance(verifiers, tuple) else ((verifiers, 1.0),)
    for one, weight in weighted:
        number = isinstance(weight, int | float) and weight
        check(bool(number), f"{key}: {one!r:.80} has the weight {weight!r:.40}; write a number")
    return [(_of_verifier(one, given, key), weight) for one, weight in weighted]


def _of_verifier(verifier: Any, given: Mapping[str, Any], key: str) -> Spread:
    if isinstance(verifier, str) and verifier in (*kinds(), JUDGE):
        return _of_kind(verifier, given)
    if verifier == "reasoning_gym":
        return ENDS
    function = load(verifier, key) if isinstance(verifier, str) else verifier
    limits, gap = getattr(function, "range", None), getattr(function, "gap", None)
    name = getattr(function, "__name__", verifier)
    try:
        low, high = map(float, limits or (0.0, max(1.0, gap or 0.0)))
        step = min(1.0, high - low) if gap is None else float(gap)
        meant = 0 < step <= high - low < float("inf")
    except (TypeError, ValueError):
        meant = False
    check(
        meant,
        f"{key}: {name!s:.80} says range = {limits!r:.80} and gap = {gap!r:.80}; the range must be"
        " two numbers, the lower one first, and the gap a positive number that fits between them",
    )
    return Spread(low, high, step)


def _of_kind(name: str, given: Mapping[str, Any]) -> Spread:
    steps = JUDGE_STEPS if name == JUDGE else kinds()[name].steps(given)
    return ENDS._replace(gap=1 / (steps or 1))


def summed(parts: Sequence[tuple[Spread, float]]) -> Spread:
    """The rewards of a weighted sum: each part's are its lowest and whole steps of its gap above.

    Where there are too many sums to look through, the gap is that of the parts' own.
    """
    low = sum(min(weight * one.low, weight * one.high) for one, weight in parts)
    high = sum(max(weight * one.low, weight * one.high) for one, weight in parts)
    own, sums = min(abs(weight) * one.gap for one, weight in parts), {0.0}
    for one, weight in parts:
        steps = int((one.high - one.low) / one.gap + NEAR)
        if len(sums) * (steps + 1) > MOST_SUMS:
            return Spread(low, high, own)
        values = [weight * (one.low + i * one.gap) for i in range(steps + 1)]
        sums = {round(so_far + value, 12) for so_far in sums for value in values}
    gaps = [b - a for a, b in pairwise(sorted(sums)) if b - a > NEAR]
    return Spread(low, high, min(gaps, default=own))


def check_rewards(sources: list[tuple[str, Any]], rewards: Any, shaping: float) -> None:
    """Raises ConfigError where no answer can count as right or as wrong, or where the rewards of a
    source are closer than `rewards.smallest_gap`, where it is set, says and `shaping` (the
    penalties' sum) relies on it. `sources` are those of `DataConfig.keyed_sources`.
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
        declared = rewards.smallest_gap
        check(
            not shaping or declared is None or found.gap >= declared - NEAR,
            f"{key} gives rewards {found.gap:g} apart, and rewards.smallest_gap ="
            f" {declared}: a penalty of rl.shaping could put the better answer below the other;"
            f" leave rewards.smallest_gap out, or set it to {found.gap:g}",
        )
