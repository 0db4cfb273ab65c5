"""A comparison of two runs: their generated tokens by training signal, and their accuracies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Series = Mapping[str, tuple[np.ndarray, np.ndarray]]  # report.read_metrics
TOKENS = "waste/tokens_generated"
SIGNALS = {
    "verifier": "waste/frac_verifier_signal",
    "shaping": "waste/frac_shaping_signal",
    "entropy": "waste/frac_entropy_signal",
    "none": "waste/frac_none",
}
SIGNAL_WORDS = {
    "verifier": "the verifier's signal",
    "shaping": "shaping's signal",
    "entropy": "entropy's signal (RL-ZVP)",
    "none": "no signal",
}
VARIED = "groups/varied_frac"


@dataclass(frozen=True)
class Spending:
    """The generated tokens of a run, by their training signal."""

    tokens: float
    steps: int
    uniform: float  # share of the groups without variance, mean over the steps
    signals: dict[str, float]  # shares of the tokens by their signal; they add up to 1


def spending(series: Series) -> Spending:
    """Returns the generated tokens of all steps of a run."""
    tokens = series[TOKENS][1]
    shares = {
        signal: float(np.average(series[name][1], weights=tokens))
        for signal, name in SIGNALS.items()
    }
    uniform = 1 - float(np.mean(series[VARIED][1]))
    return Spending(float(tokens.sum()), len(tokens), uniform, shares)


def comparison_rows(
    names: tuple[str, str],
    runs: tuple[Spending, Spending],
    accuracy: tuple[tuple[float, float], tuple[float, float]],
    k: int,
) -> list[dict[str, str]]:
    """Returns the rows of a table (report.summary_table) that compares two runs.

    accuracy: avg@k before and after, for each run.
    """

    def row(label: str, *cells: str) -> dict[str, str]:
        return {"": label, **dict(zip(names, cells, strict=True))}

    return [
        row("generated tokens", *(f"{run.tokens:,.0f}" for run in runs)),
        row("steps", *(f"{run.steps}" for run in runs)),
        row("groups without variance", *(f"{run.uniform:.0%}" for run in runs)),
        *(
            row(f"tokens with {text}", *(f"{run.signals[name]:.0%}" for run in runs))
            for name, text in SIGNAL_WORDS.items()
        ),
        row(f"accuracy, avg@{k}", *(f"{first:.3f} -> {last:.3f}" for first, last in accuracy)),
    ]


def difference_in_words(paired: Mapping[str, Any]) -> str:
    """Returns a sentence on the paired difference of two accuracies in percentage points, with its
    interval.

    paired: `averages` of experience/paired.py, from the baseline to this run.
    """
    if None in (paired["difference"], *paired["interval"]):
        return "the difference of the accuracies is not known"
    points, low, high = (100 * x for x in (paired["difference"], *paired["interval"]))
    side = "above" if points > 0 else "below"
    sentence = (
        f"accuracy: {abs(points):.1f} points {side} plain GRPO's (95% interval of the difference:"
        f" {low:+.1f} to {high:+.1f}, {paired['prompts']} prompts, one seed)"
    )
    if low <= 0 <= high:
        sentence += ": these prompts show no difference"
    return sentence
