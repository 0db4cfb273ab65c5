"""The verifiers that a data source names: one, or several with weights.

Also describes the rewards of the named verifiers, before their code is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple

from compass_jax.base.aliases import Json, JsonMapping, Settings
from compass_jax.config.errors import check
from compass_jax.config.kinds import kinds
from compass_jax.config.named import check_name, load
from compass_jax.config.ranges import Name, Range

Weight = Annotated[float, Range(-1000, 1000)]
# a name, or ((name, weight), ...); a mapping {name: weight} is converted to the latter
Verifiers = str | tuple[tuple[Name, Weight], ...]
Options = tuple[tuple[str, int | float | str | bool | tuple], ...]

JUDGE = "judge"  # not in `kinds`: the trainer's process asks the judge (rewards/judges/judging.py)
VERDICT = "verdict"  # its rows are preferences, each asked in both orders (data/preferences.py)
JUDGE_STEPS = 2  # Worse, Tie, Better
EXAMPLE = "'my_rewards:score'; or one of {}"
MOST_SUMS = 100_000  # different rewards of a weighted source that are enumerated for the gap
NEAR = 1e-9  # tolerance between sums of weights


def pairs(verifier: Verifiers) -> tuple[tuple[str, float], ...]:
    """Returns (name, weight) of each verifier; an empty tuple for an empty name."""
    return ((verifier, 1.0),) * bool(verifier) if isinstance(verifier, str) else verifier


def looked_for(source: Settings, tag: str) -> str:
    """Returns a description of the place in a response where the verifiers of a source search the
    answer.
    """
    places = []
    last = f"the text in the last <{tag}>...</{tag}>" if tag else "the whole response"
    answer = f"{last}, else in the last \\boxed{{...}}, else after the last ####" if tag else last
    named = getattr(source, "verifier", None)
    if named == ():
        return "nothing: the environment gives the reward"
    for name, _ in pairs(named or source.task):
        if name in kinds():
            places.append(kinds()[name].looks_for.format(answer=answer, last=last, tag=tag))
        else:
            special = {"reasoning_gym": last, JUDGE: "the whole response, by the judge"}
            places.append(special.get(name, f"what {name} reads"))
    return (
        "; ".join(dict.fromkeys(filter(None, places)))
        or "nothing: these verifiers judge the form alone"
    )


def check_verifiers(source: Settings, key: str, extra: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for an unusable `verifier` or `verifier_args` of a source.

    extra: names besides the built-in ones, such as the data set's own scorer.
    """
    names, usual = [name for name, _ in pairs(source.verifier)], kinds()
    extra = (*extra, JUDGE)
    known = ", ".join(f"'{name}'" for name in (*usual, *extra))
    check(bool(names), f"{key}.verifier is empty: name one of {known}, or a function")
    check_names(source.verifier, f"{key}.verifier", extra)
    columns = {getattr(source, f"{name}_field", "auto") for name in ("prompt", "answer")}
    check(
        VERDICT not in names or columns == {"auto"},
        f"{key}: with verifier = {VERDICT!r} the rows are preferences, whose columns have fixed"
        " names (docs/howto/judge.md); leave prompt_field and answer_field out",
    )
    arguments = dict(source.verifier_args)
    verifier_kinds = [usual[name] for name in names if name in usual]
    accepted = {argument for kind in verifier_kinds for argument in kind.takes}
    unknown_names = sorted(set(arguments) - accepted) if set(names) <= {*usual, *extra} else []
    check(
        not unknown_names,
        f"{key}.verifier_args: {', '.join(names)} take no {', '.join(unknown_names)}; they take"
        f" {', '.join(sorted(accepted)) or 'none'}",
    )
    for kind in verifier_kinds:
        complaint = kind.complaint(arguments)
        check(not complaint, f"{key}.verifier_args: {complaint}")


def check_names(verifiers: Verifiers, key: str, extra: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for an unknown or repeated verifier in `key`, or one of weight 0.

    extra: as in `check_verifiers`.
    """
    names, known = [name for name, _ in pairs(verifiers)], (*kinds(), *extra)
    for name, weight in pairs(verifiers):
        if name not in known:
            _check_own(name, key, known)
        check(weight != 0, f"{key}: {name!r} has weight 0; leave it out")
        check(names.count(name) == 1, f"{key} names {name!r} twice")


def _check_own(name: str, key: str, known: tuple[str, ...]) -> None:
    matches = difflib.get_close_matches(name, known, n=1)
    suggestion = matches[0] if matches and ":" not in name else ""
    check(not suggestion, f"{key} = {name!r:.200}: did you mean {suggestion!r}?")
    check_name(name, key, EXAMPLE.format(", ".join(f"'{one}'" for one in known)))


class Spread(NamedTuple):
    """The range of rewards, and the smallest difference between two of them (`gap`).

    If the gap depends on the row, it is the largest possible one.
    """

    low: float
    high: float
    gap: float


# 0 and 1, with row-dependent rewards in between
ENDS = Spread(0.0, 1.0, 1.0)


def spread(source: Settings) -> Spread | None:
    """Returns the rewards of a source, or None if one of its verifiers is neither the judge nor
    built in (such as a task's), or if it has none (episodes).
    """
    named = pairs(getattr(source, "verifier", ""))
    if not named or any(name not in (*kinds(), JUDGE) for name, _ in named):
        return None
    arguments = dict(source.verifier_args)
    return summed([(_of_kind(name, arguments), weight) for name, weight in named])


def smallest_gap(sources: list[tuple[str, Settings]], rewards: Settings) -> tuple[float, str]:
    """Returns the smallest difference between two rewards, and the setting that determines it.

    The setting is that of `rewards`, or the source in `sources` (of `DataConfig.keyed_sources`)
    whose verifiers give the closest rewards. A verifier whose rewards depend on its row counts as 0
    and 1.

    Raises ConfigError for a function or task that cannot be imported, or that declares an invalid
    range or gap.
    """
    if rewards.smallest_gap is not None:
        return rewards.smallest_gap, "rewards.smallest_gap"
    gaps = [(summed(_spreads(source, where)).gap, where) for where, source in sources]
    return min(gaps, default=(ENDS.gap, "rewards.smallest_gap"))


def below_zero(sources: list[tuple[str, Settings]], rewards: Settings, overlong: float) -> str:
    """Returns the setting by which a reward may be below 0, or an empty text.

    Args:
        sources: (setting, source) pairs, of `DataConfig.keyed_sources`.
        overlong: penalty that any answer can lose.

    Raises the errors of `smallest_gap`.
    """
    if rewards.wrong_at < 0:
        return f"rewards.wrong_at = {rewards.wrong_at}"
    for where, source in sources:
        low = summed(_spreads(source, where)).low
        if low < -NEAR:
            return f"{where} gives rewards down to {low:g}"
        if low < overlong - NEAR:
            return f"rl.shaping.overlong_penalty = {overlong:g} is taken from rewards of {low:g}"
    return ""


def _spreads(source: Settings, where: str) -> list[tuple[Spread, float]]:
    """Returns the rewards and the weight of each verifier of a source. Imports functions."""
    arguments, key = dict(getattr(source, "verifier_args", ())), f"{where}.verifier"
    verifiers: Json = getattr(source, "verifier", None)
    if verifiers is None:
        key = f"{where}.task"
        verifiers = getattr(load(source.task, key), "verify", "")
        verifiers = tuple(verifiers.items()) if isinstance(verifiers, Mapping) else verifiers
    if verifiers == ():  # an environment's
        return [(ENDS, 1.0)]
    weighted = verifiers if isinstance(verifiers, tuple) else ((verifiers, 1.0),)
    for one, weight in weighted:
        number = isinstance(weight, int | float) and weight
        check(bool(number), f"{key}: {one!r:.80} has the weight {weight!r:.40}; write a number")
    return [(_of_verifier(one, arguments, key), weight) for one, weight in weighted]


def _of_verifier(verifier: Json, arguments: JsonMapping, key: str) -> Spread:
    if isinstance(verifier, str) and verifier in (*kinds(), JUDGE):
        return _of_kind(verifier, arguments)
    if verifier == "reasoning_gym":
        return ENDS
    function = load(verifier, key) if isinstance(verifier, str) else verifier
    limits, gap = getattr(function, "range", None), getattr(function, "gap", None)
    name = getattr(function, "__name__", verifier)
    try:
        low, high = map(float, limits or (0.0, max(1.0, gap or 0.0)))
        step = min(1.0, high - low) if gap is None else float(gap)
        is_valid = 0 < step <= high - low < float("inf")
    except (TypeError, ValueError):
        is_valid = False
    check(
        is_valid,
        f"{key}: {name!s:.80} says range = {limits!r:.80} and gap = {gap!r:.80}; the range must be"
        " two numbers, the lower one first, and the gap a positive number that fits between them",
    )
    return Spread(low, high, step)


def _of_kind(name: str, arguments: JsonMapping) -> Spread:
    steps = JUDGE_STEPS if name == JUDGE else kinds()[name].steps(arguments)
    return ENDS._replace(gap=1 / (steps or 1))


def summed(parts: Sequence[tuple[Spread, float]]) -> Spread:
    """Returns the rewards of a weighted sum; each part takes its lowest reward plus multiples of
    its gap.

    With too many different sums to enumerate, the gap is the smallest weighted gap of the parts.
    """
    low = sum(min(weight * one.low, weight * one.high) for one, weight in parts)
    high = sum(max(weight * one.low, weight * one.high) for one, weight in parts)
    smallest, sums = min(abs(weight) * one.gap for one, weight in parts), {0.0}
    for one, weight in parts:
        steps = int((one.high - one.low) / one.gap + NEAR)
        if len(sums) * (steps + 1) > MOST_SUMS:
            return Spread(low, high, smallest)
        values = [weight * (one.low + i * one.gap) for i in range(steps + 1)]
        sums = {round(so_far + value, 12) for so_far in sums for value in values}
    gaps = [b - a for a, b in pairwise(sorted(sums)) if b - a > NEAR]
    return Spread(low, high, min(gaps, default=smallest))


def check_rewards(sources: list[tuple[str, Settings]], rewards: Settings, shaping: float) -> None:
    """Raises ConfigError if no answer of a source can count as right, or none as wrong, or if its
    rewards are closer than a set `rewards.smallest_gap` while penalties rely on that gap.

    sources: of `DataConfig.keyed_sources`. shaping: sum of the penalties.
    """
    for where, source in sources:
        key, limits = f"{where}.verifier", spread(source)
        if limits is None:
            continue
        check(
            limits.high >= rewards.right_at - NEAR,
            f"{key} gives at most {limits.high:g}, and rewards.right_at = {rewards.right_at:g}: no"
            " answer could count as right; raise the weights or lower rewards.right_at",
        )
        check(
            limits.low <= rewards.wrong_at + NEAR,
            f"{key} gives at least {limits.low:g}, and rewards.wrong_at = {rewards.wrong_at:g}: no"
            " answer could count as wrong; raise rewards.wrong_at",
        )
        declared = rewards.smallest_gap
        check(
            not shaping or declared is None or limits.gap >= declared - NEAR,
            f"{key} gives rewards {limits.gap:g} apart, and rewards.smallest_gap ="
            f" {declared}: a penalty of rl.shaping could put the better answer below the other;"
            f" leave rewards.smallest_gap out, or set it to {limits.gap:g}",
        )
