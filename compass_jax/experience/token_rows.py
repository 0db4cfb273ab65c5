"""Rows of tokens.jsonl: numbers of single tokens, for a bounded number of tokens in a step's logged
groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np

from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.base.records import Group

DIGITS = 3  # significant digits of a logged number


def evenly_spaced(count: int, most: int) -> list[int]:
    """Returns at most `most` of the numbers below `count`, evenly spaced: a step's groups are in
    the order of its updates, and the log should have some of each update.
    """
    chosen = min(count, most)
    return [i * count // chosen for i in range(chosen)]


def token_rows(
    groups: Sequence[Group],
    values: Mapping[str, np.ndarray],
    size: int,
    pieces: Callable[[np.ndarray], Sequence[str]],
    most: int,
    untraced: Container[int] = (),
) -> list[JsonObject]:
    """Returns a row for each group: means of `values` over each sample's tokens under `means` (for
    logp_diff of its absolute value), and the numbers of at most `most` tokens in all.

    `group` counts the groups and `sample` a group's samples, both from 0. In a sample, `text` has
    the number of characters that each token adds to the response, `version` the policy version that
    sampled it (-1: an environment's token), and the other lists come from `values`. One number
    stands for a list of equal ones, and null for one that is not finite.

    Args:
        values: `[n t]` each; row i * size + j is that of sample j of group i.
        size: rows of a group.
        pieces: returns the text that each token of a response adds.
        most: the best and the worst sample of each group come first; the last sample may have
            numbers for its first tokens only.
        untraced: groups that get no row, because `values` has other rows in their places.
    """
    rows: dict[int, JsonObject] = {
        g: {"group": g, "means": _means(group, values, g * size), "samples": []}
        for g, group in enumerate(groups)
        if g not in untraced
    }
    for g, s in _by_interest(groups):
        if g in untraced:
            continue
        rollout = groups[g].rollouts[s]
        logged = min(rollout.response_length, most)
        most -= logged
        if not logged:
            continue
        start = len(rollout.prompt.tokens)
        part = slice(start, start + logged)
        row = g * size + rollout.sample
        numbers = {name: _column(array[row, part]) for name, array in values.items()}
        rows[g]["samples"].append(
            {
                "sample": s,
                "tokens": logged,
                # A few more tokens, since a character may end in a later one.
                "text": [len(x) for x in pieces(rollout.response[: logged + 8])[:logged]],
                "version": _column(rollout.versions[part]),
                **numbers,
            }
        )
    return list(rows.values())


def _means(
    group: Group, values: Mapping[str, np.ndarray], first: int
) -> dict[str, list[int | float | None]]:
    """Returns name -> the mean of each sample of a group whose rows begin at `first`."""
    start = len(group.prompt.tokens)
    parts = [(first + r.sample, start + np.flatnonzero(r.generated)) for r in group.rollouts]
    means: dict[str, list[int | float | None]] = {}
    for name, array in values.items():
        measured = np.abs(array) if name == "logp_diff" else array
        means[name] = [_mean(measured[row, at]) for row, at in parts]
    return means


def _mean(values: np.ndarray) -> int | float | None:
    """Returns a mean; None for that of no token, in an episode that failed before its first."""
    return _rounded(float(values.mean())) if values.size else None


def _by_interest(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Returns (group, sample) of all samples: each group's best, then each group's worst, then the
    others.
    """
    order = []
    for g, group in enumerate(groups):
        known = [(-score.reward, i) for i, score in enumerate(group.scores) if score.known]
        ranked = [i for _, i in sorted(known)]
        first = ranked[:1] + ranked[-1:][: len(ranked) - 1]
        remaining = [i for i in range(len(group.rollouts)) if i not in first]
        order += [(rank, g, i) for rank, i in enumerate(first)]
        order += [(len(group.rollouts) + rank, g, i) for rank, i in enumerate(remaining)]
    return [(g, i) for _, g, i in sorted(order)]


def _column(values: np.ndarray) -> Tree:
    """Returns a list of rounded numbers, or one number where all are equal."""
    numbers = [_rounded(float(x)) for x in values]
    return numbers[0] if all(x == numbers[0] for x in numbers) else numbers


def _rounded(x: float) -> int | float | None:
    """Rounds `x` to DIGITS significant digits; a whole number becomes an int, also in JSON."""
    if not math.isfinite(x):
        return None
    if x == int(x) and abs(x) < 1e9:
        return int(x)
    return float(f"{x:.{DIGITS}g}")
