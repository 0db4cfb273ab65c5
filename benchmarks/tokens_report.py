"""The measure of benchmarks/tokens_to_accuracy.py, from its rows: tokens and minutes to a target,
ratios paired by seed with their intervals, the table and the picture.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import rl_runs
from benchmarks.targets import cost_to_stay, means_of_evaluations, target_of
from compass_jax.runs.report.targets import Curve, means_over

Row = Mapping[str, Any]
Smooth = Callable[[Curve], list[list[float]]]
BASELINE = "grpo"
WINDOW_SHARE = 0.13  # share of a run's tokens over which `over_window` takes means
MOST_RESAMPLES = 10_000  # all resamples of up to five seeds are fewer
UNIFORM_SHARE, COLD_ACCURACY = 0.6, (0.05, 0.2)  # planned for the task


class Interval(NamedTuple):
    """A geometric mean and its 95% bootstrap interval; NaN without values."""

    mean: float
    low: float
    high: float


class Ratio(NamedTuple):
    """A run's cost over the baseline's of the same seed, and whether each stayed at the target.

    A cost without the target is a lower bound, so a missed target makes the ratio a lower bound, of
    the baseline's an upper one.
    """

    cost: float
    reached: bool
    baseline_reached: bool


def by_tokens(row: Row) -> list[list[float]]:
    """Returns a row's curve as [tokens, accuracy]."""
    return [[tokens, accuracy] for tokens, _, accuracy in row["curve"]]


def by_minutes(row: Row) -> list[list[float]]:
    """Returns a row's curve as [minutes, accuracy]."""
    return [[minutes, accuracy] for _, minutes, accuracy in row["curve"]]


def over_window(curve: Curve) -> list[list[float]]:
    """Returns the means of a curve over WINDOW_SHARE of its cost, which do not depend on the
    distance of its evaluations. Runs of one experiment have the same budget.
    """
    return means_over(curve, WINDOW_SHARE * curve[-1][0])


def targets(rows: Sequence[Row]) -> dict[int, float]:
    """Returns the target accuracy of each seed whose baseline gained: a0 + 0.9 (a1 - a0), with a0
    before RL and a1 the mean of the baseline's last three evaluations.
    """
    accuracies = {}
    for row in rows:
        if row["variant"] == BASELINE:
            target = target_of(means_of_evaluations(by_tokens(row)))
            if target is not None:
                accuracies[row["seed"]] = target
    return accuracies


def ratios(
    rows: Sequence[Row], minutes: bool = False, smooth: Smooth = means_of_evaluations
) -> dict[str, list[Ratio]]:
    """Returns each variant's ratios to the baseline of the same seed, in the order of the seeds."""
    curve_of = by_minutes if minutes else by_tokens
    base = {row["seed"]: row for row in rows if row["variant"] == BASELINE}
    goals, out = targets(rows), dict[str, list[Ratio]]()
    for name, runs in rl_runs.by_variant(rows).items():
        for row in runs:
            if (goal := goals.get(row["seed"])) is None:
                continue
            cost, reached = cost_to_stay(smooth(curve_of(row)), goal)
            usual = cost_to_stay(smooth(curve_of(base[row["seed"]])), goal)
            ratio = max(cost, 1e-9) / max(usual.cost, 1e-9)
            out.setdefault(name, []).append(Ratio(ratio, reached, usual.reached))
    return out


def interval(ratios: Sequence[Ratio]) -> Interval:
    """Returns the geometric mean of ratios and its percentile bootstrap interval over seeds, from
    all resamples of up to five seeds and from MOST_RESAMPLES drawn ones of more.
    """
    if not ratios:
        return Interval(math.nan, math.nan, math.nan)
    logs, n = np.log([ratio.cost for ratio in ratios]), len(ratios)
    if n**n <= MOST_RESAMPLES:
        draws = np.array(list(itertools.product(range(n), repeat=n)))
    else:
        draws = np.random.default_rng(0).integers(0, n, (MOST_RESAMPLES, n))
    means = np.exp(logs[draws].mean(axis=1))
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(np.exp(logs.mean())), float(low), float(high))


def report(rows: Sequence[Row], step: str, planned: bool = True) -> str:
    """Returns a table in Markdown: ratios of tokens (by both measures) and of minutes to tuned
    GRPO, accuracy at the end, tokens, shares of uniform groups and of the verifier's signal; and,
    for the task of tokens_to_accuracy (`planned`), whether it was as planned. `step`: the arms'
    step size.
    """
    lines = [
        f"{'Tuned ' if planned else ''}GRPO: {step}. Ratios are geometric means over seeds with 95%"
        " intervals; > marks a lower bound, since some runs (their number in brackets) never stayed"
        " at the target; < an upper bound, since some of GRPO's runs did not, by this measure; ?"
        " no bound, since both happened.",
        "",
        "| arm | seeds | tokens to the target | means over equal tokens | minutes to the target"
        " | accuracy at the end | thousand tokens | uniform groups | verifier |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    measures = ratios(rows), ratios(rows, smooth=over_window), ratios(rows, minutes=True)
    for name, runs in rl_runs.by_variant(rows).items():
        cells = [runs[0]["name"], str(len(runs))]
        cells += [_ratio(of.get(name, [])) for of in measures]
        cells.append(rl_runs.spread([means_of_evaluations(by_tokens(row))[-1][1] for row in runs]))
        cells.append(rl_runs.spread([row["tokens"] / 1e3 for row in runs], "{:.0f}"))
        cells.append(rl_runs.spread([100 * row["uniform_frac"] for row in runs], "{:.0f}") + " %")
        verifier = [100 * row["shares"]["verifier_signal"] for row in runs]
        cells.append(rl_runs.spread(verifier, "{:.0f}") + " %")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *([_conditions(rows), ""] if planned else [])])


def _ratio(ratios: Sequence[Ratio]) -> str:
    """Returns a ratio with its interval as text, marked where it is a bound."""
    if not ratios:
        return "-"
    mean, low, high = interval(ratios)
    missed = sum(not one.reached for one in ratios)
    baselines = sum(not one.baseline_reached for one in ratios)
    text = f"{mean:.2f} ({low:.2f} to {high:.2f})"
    if baselines:
        return f"{'?' if missed else '<'} {text} [{missed}, GRPO {baselines}]"
    return f"> {text} [{missed}]" if missed else text


def _conditions(rows: Sequence[Row]) -> str:
    """Returns whether the task was as planned, in a sentence."""
    base = [row for row in rows if row["variant"] == BASELINE]
    starts = [row["curve"][0][2] for row in base]
    uniform = float(np.mean([row["uniform_frac"] for row in base]))
    low, high = COLD_ACCURACY
    is_as_planned = all(low <= x <= high for x in starts) and uniform >= UNIFORM_SHARE
    return (
        f"The task is {'' if is_as_planned else 'not '}as planned: accuracy before RL"
        f" {rl_runs.spread(starts)} (planned {low} to {high}), uniform groups of tuned GRPO"
        f" {100 * uniform:.0f} % (planned at least {100 * UNIFORM_SHARE:.0f} %)."
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws accuracy against tokens and against minutes: the mean over seeds of each arm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained", sharey=True)
    sides = ((by_tokens, 1e3, "thousand generated tokens"), (by_minutes, 1, "minutes"))
    for side, (curve_of, unit, label) in zip(axes, sides, strict=True):
        styles = itertools.product(("-", "--", ":"), rl_runs.COLOURS)
        for (style, colour), (name, runs) in zip(
            styles, rl_runs.by_variant(rows).items(), strict=False
        ):
            curves = [np.array(means_of_evaluations(curve_of(row))) for row in runs]
            grid = np.linspace(max(c[0, 0] for c in curves), min(c[-1, 0] for c in curves), 60)
            mean = np.mean([np.interp(grid, c[:, 0], c[:, 1]) for c in curves], axis=0)
            side.plot(grid / unit, mean, style, color=colour, label=f"{name} ({len(runs)})")
        side.set(xlabel=label)
        side.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="held-out accuracy, smoothed")
    axes[1].legend(title="arm (seeds)", frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
