"""What the generated tokens of a run were spent on, beside a recorded run at equal tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compass_jax.errors import UserError

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


class RecordError(UserError):
    """A recorded run does not hold what a comparison needs; the message names the file."""


@dataclass(frozen=True)
class Spending:
    """The first `tokens` generated tokens of a run."""

    tokens: float
    uniform: float  # share of the groups without variance, mean over the steps
    signals: dict[str, float]  # shares of the tokens by their signal; they add up to 1


def spending(series: Series, most: float = np.inf) -> Spending:
    """Of the first steps of a run, up to the one that reaches `most` generated tokens."""
    tokens = series[TOKENS][1]
    count = min(int(np.searchsorted(np.cumsum(tokens), most)) + 1, len(tokens))
    tokens = tokens[:count]
    shares = {
        signal: float(np.average(series[name][1][:count], weights=tokens))
        for signal, name in SIGNALS.items()
    }
    uniform = 1 - float(np.mean(series[VARIED][1][:count]))
    return Spending(float(tokens.sum()), uniform, shares)


@dataclass(frozen=True)
class Recorded:
    """A run that was made before: its series, and its accuracy after so many generated tokens."""

    seed: int
    series: Series
    accuracy: tuple[tuple[float, float], ...]  # (tokens, accuracy), tokens increasing from 0
    source: str  # the command and the commit that made it

    def accuracy_at(self, tokens: float) -> float:
        """Between two evaluations on the line between them; after the last one, its value."""
        return float(np.interp(tokens, *np.array(self.accuracy).T))


def read_recorded(path: Path, seed: int) -> Recorded:
    """The recorded run of `seed`, or of another seed where there is none. RecordError where the
    file is not such a record.
    """
    try:
        data = json.loads(path.read_text())
        runs = {run["seed"]: run for run in data["runs"]}
        run = runs.get(seed) or next(iter(runs.values()))
        series = {
            name: (np.arange(1, len(run[TOKENS]) + 1), np.asarray(run[name], float))
            for name in (TOKENS, VARIED, *SIGNALS.values())
        }
        accuracy = tuple((float(tokens), float(value)) for tokens, value in run["accuracy"])
        source = f"{data['command']}, commit {data['commit']}"
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise RecordError(
            f"{path}: not a record of runs ({error!r}); make it with"
            " `python -m benchmarks.demo_grpo`"
        ) from error
    return Recorded(run["seed"], series, accuracy, source)


def record_of(seed: int, series: Series, accuracy: list[tuple[float, float]]) -> dict[str, Any]:
    """One of the runs of a record, rounded to what a table shows."""
    out: dict[str, Any] = {"seed": seed, TOKENS: [int(x) for x in series[TOKENS][1]]}
    for name in (VARIED, *SIGNALS.values()):
        out[name] = [round(float(x), 4) for x in series[name][1]]
    return out | {"accuracy": [[int(tokens), round(value, 4)] for tokens, value in accuracy]}


def comparison_rows(
    names: tuple[str, str],
    runs: tuple[Spending, Spending],
    accuracy: tuple[tuple[float, float], tuple[float, float]],
    k: int,
) -> list[dict[str, str]]:
    """Rows for report.summary_table: two runs side by side. `accuracy`: avg@k before and after, of
    each run.
    """

    def row(label: str, *shown: str) -> dict[str, str]:
        return {"": label, **dict(zip(names, shown, strict=True))}

    return [
        row("generated tokens", *(f"{run.tokens:,.0f}" for run in runs)),
        row("groups without variance", *(f"{run.uniform:.0%}" for run in runs)),
        *(
            row(f"tokens with {text}", *(f"{run.signals[name]:.0%}" for run in runs))
            for name, text in SIGNAL_WORDS.items()
        ),
        row(f"accuracy, avg@{k}", *(f"{first:.3f} -> {last:.3f}" for first, last in accuracy)),
    ]
