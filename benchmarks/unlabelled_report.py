"""The measures of benchmarks/unlabelled_accuracy.py, from its rows: passages, ends, stability, the
table and the picture.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from benchmarks.rl_runs import COLOURS, spread
from compass_jax.runs.report.targets import Curve, first_passage, means_over

Row = dict[str, Any]
BASELINE, GAIN = "grpo", 0.9
WINDOW_SHARE = 0.13  # of a whole run's cost, over which means are taken
BUDGET = 160_000  # tokens of a whole run
LEVELS = (0.03, 0.06, 0.09, 0.12, 0.15)  # above the start's accuracy
TASKS = ("hard", "easy", "short")
SIMULATED = 400  # flat curves


class Ratio(NamedTuple):
    """A geometric mean over seeds and its 95% interval; `missed` runs count with their cost."""

    mean: float
    low: float
    high: float
    missed: int


def key_of(row: Row) -> tuple[Any, ...]:
    """Returns what a row is found by."""
    return tuple(row[name] for name in ("phase", "task", "seed", "arm", "cell"))


def smoothed(row: Row, cost: int = 0) -> list[list[float]]:
    """Returns the means of a row's curve over tokens (cost 0) or minutes (1), with the window of a
    whole run where this one ended early.
    """
    curve = [[point[cost], point[2]] for point in row["curve"]]
    whole = BUDGET * curve[-1][0] / row["curve"][-1][0]
    return means_over(curve, WINDOW_SHARE * whole)


def passed(row: Row, accuracy: float) -> bool:
    """Returns whether the passage of an accuracy is known: later evaluations do not change it."""
    first = first_passage(smoothed(row), accuracy)
    return first is not None and row["curve"][-1][0] >= first + WINDOW_SHARE * BUDGET / 2


def goal_of(base: Row) -> float:
    """Returns the accuracy of the baseline's start + GAIN of its gain."""
    start = base["curve"][0][2]
    return start + GAIN * (smoothed(base)[-1][1] - start)


def score(row: Row, cost: int = 0) -> float:
    """Returns the mean over LEVELS of the tokens (cost 0) or minutes (1) to the start's accuracy +
    the level; those of the whole run for one that is not reached.
    """
    means, start = smoothed(row, cost), row["curve"][0][2]
    passages = (first_passage(means, start + level) for level in LEVELS)
    return float(np.mean([means[-1][0] if x is None else x for x in passages]))


def passage(row: Row, base: Row, cost: int) -> tuple[float, bool]:
    """Returns the cost at which a run first has GAIN of the baseline's gain, and whether it does;
    its whole cost where it does not.
    """
    means = smoothed(row, cost)
    reached = first_passage(means, goal_of(base))
    return (means[-1][0], False) if reached is None else (max(reached, 1e-3), True)


def by_seed(rows: Sequence[Row], task: str, arm: str) -> dict[int, Row]:
    """Returns the rows of an arm in the results of a task."""
    return {x["seed"]: x for x in rows if (x["phase"], x["arm"]) == (task, arm)}


def ratio(rows: Sequence[Row], task: str, arm: str, cost: int) -> Ratio | None:
    """Returns the ratio of first passages to the baseline's, paired by seed; None without pairs.
    Seeds whose baseline gains nothing are left out.
    """
    base, runs = by_seed(rows, task, BASELINE), by_seed(rows, task, arm)
    gained = [x for x in runs if x in base and smoothed(base[x])[-1][1] > base[x]["curve"][0][2]]
    pairs = [(passage(runs[x], base[x], cost), passage(base[x], base[x], cost)) for x in gained]
    if not pairs:
        return None
    logs = np.array([math.log(one[0] / other[0]) for one, other in pairs])
    mean, half = mean_and_half(logs)
    missed = sum(not one[1] for one, _ in pairs)
    return Ratio(*(math.exp(x) for x in (mean, mean - half, mean + half)), missed)


def mean_and_half(values: np.ndarray) -> tuple[float, float]:
    """Returns a mean and the half of its 95% interval (t); NaN for a single value."""
    n = len(values)
    half = stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
    return float(values.mean()), float(half)


def end_difference(rows: Sequence[Row], task: str, arm: str) -> tuple[float, float] | None:
    """Returns the mean of the differences of the ends to the baseline's and its standard error."""
    base, runs = by_seed(rows, task, BASELINE), by_seed(rows, task, arm)
    pairs = [(runs[x], base[x]) for x in runs if x in base]
    values = np.array([one["end"] - other["end"] for one, other in pairs if "end" in one])
    if len(values) < 2:
        return None
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def fall(curve: Curve) -> float:
    """Returns the greatest mean minus the last."""
    means = means_over(curve, WINDOW_SHARE * curve[-1][0])
    return max(x for _, x in means) - means[-1][1]


def flat_fall(row: Row, answers: int, rng: np.random.Generator) -> float:
    """Returns the mean fall of simulated curves at the run's costs whose true accuracy is the run's
    last mean, each point the share of right ones of `answers` answers.
    """
    costs = [point[0] for point in row["curve"]]
    accuracy = float(np.clip(smoothed(row)[-1][1], 0, 1))
    falls = []
    for _ in range(SIMULATED):
        shares = rng.binomial(answers, accuracy, len(costs)) / answers
        falls.append(fall([[cost, share] for cost, share in zip(costs, shares, strict=True)]))
    return float(np.mean(falls))


def stability(rows: Mapping[int, Row], answers: int) -> tuple[float, float]:
    """Returns the mean fall of whole runs and of flat ones."""
    rng = np.random.default_rng(0)
    whole = [row for row in rows.values() if "end" in row]
    own = [fall([[x[0], x[2]] for x in row["curve"]]) for row in whole]
    flat = [flat_fall(row, answers, rng) for row in whole]
    return float(np.mean(own)), float(np.mean(flat))


def report(rows: Sequence[Row], answers: int = 480) -> str:
    """Returns the tables of all tasks, and the scores of tuning, in Markdown."""
    lines: list[str] = []
    for task in TASKS:
        if not by_seed(rows, task, BASELINE):
            continue
        lines += [
            f"Task {task}. First passage of start + 0.9 x GRPO's gain, as ratio to GRPO, paired by"
            " seed: geometric mean, 95% interval; > marks a lower bound, with the runs (in"
            " brackets) that did not get there.",
            "",
            "| arm | seeds | tokens | minutes | end, avg@8 | minus GRPO's | fall (flat runs)"
            " | too hard drawn | uniform groups |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        arms = dict.fromkeys(row["arm"] for row in rows if row["phase"] == task)
        lines += [_line(rows, task, arm, answers) for arm in arms]
        lines.append("")
    tuning = [row for row in rows if row["phase"] in ("tuning", "pieces")]
    if tuning:
        lines += ["| tuning | setting | thousand tokens to the levels, by seed |", "|---|---|---|"]
        kinds = dict.fromkeys((row["arm"], row["cell"]) for row in tuning)
        scored = {
            kind: [score(x) / 1e3 for x in tuning if (x["arm"], x["cell"]) == kind]
            for kind in kinds
        }
        for kind in sorted(kinds, key=lambda x: (x[0], -len(scored[x]), np.mean(scored[x]))):
            lines.append(
                f"| {kind[0]} | {kind[1]} | {', '.join(f'{x:.0f}' for x in scored[kind])} |"
            )
    return "\n".join(lines)


def _line(rows: Sequence[Row], task: str, arm: str, answers: int) -> str:
    runs = by_seed(rows, task, arm)
    cells = [f"{arm} ({next(iter(runs.values()))['cell']})", str(len(runs))]
    for cost in (0, 1):
        of = ratio(rows, task, arm, cost)
        text = "" if of is None else f"{of.mean:.2f} ({of.low:.2f} to {of.high:.2f})"
        cells.append(f"> {text} [{of.missed}]" if of and of.missed else text)
    ends = [row["end"] for row in runs.values() if "end" in row]
    cells.append(spread(ends) if ends else "")
    difference = end_difference(rows, task, arm)
    cells.append("" if difference is None else f"{difference[0]:+.3f} ± {difference[1]:.3f}")
    own, flat = stability(runs, answers) if ends else (math.nan, math.nan)
    cells.append(f"{own:.3f} ({flat:.3f})" if ends else "")
    for name in ("hard_drawn", "uniform"):
        cells.append(f"{100 * float(np.mean([row[name] for row in runs.values()])):.0f}%")
    return "| " + " | ".join(cells) + " |"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws accuracy against tokens and against minutes: the mean over seeds of each arm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [x for x in TASKS if by_seed(rows, x, BASELINE)]
    if not shown:
        return
    figure, axes = plt.subplots(
        len(shown), 2, figsize=(12, 4.5 * len(shown)), layout="constrained", squeeze=False
    )
    for place, task in enumerate(shown):
        arms = dict.fromkeys(row["arm"] for row in rows if row["phase"] == task)
        for cost, label in enumerate(("thousand generated tokens", "minutes")):
            side = axes[place, cost]
            for (style, colour), arm in zip(itertools.product(("-", "--", ":"), COLOURS), arms):
                runs = by_seed(rows, task, arm)
                curves = [np.array(smoothed(row, cost)) for row in runs.values()]
                grid = np.linspace(0, min(x[-1, 0] for x in curves), 80)
                mean = np.mean([np.interp(grid, *x.T) for x in curves], axis=0)
                unit = 1 if cost else 1e3
                side.plot(grid / unit, mean, style, color=colour, label=f"{arm} ({len(runs)})")
            side.set(xlabel=label, ylabel=f"held-out accuracy, {task}")
            side.spines[["top", "right"]].set_visible(False)
        axes[place, 1].legend(title="arm (seeds)", frameon=False, fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)
