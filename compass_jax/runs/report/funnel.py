"""The account of a run's tokens: generated, with a verdict, and by their training signal; with the
effect and the cost of each stage against zero variance.
"""

from __future__ import annotations

import numpy as np

from compass_jax.base.aliases import JsonObject
from compass_jax.runs.report.metrics import Series, total

SIGNALS = ("verifier", "shaping", "entropy", "prediction")


def token_funnel(series: Series) -> JsonObject | None:
    """Returns the tokens of an RL stage, as JSON, or None if no step logged their number.

    generated = dropped (by dynamic sampling) + unknown (no verdict) + verifier + shaping + entropy
    + prediction + silent (a verdict, but no signal). The metrics count tokens without a verdict by
    samples, so unknown is an estimate: the share of the step's samples times its tokens. Tokens
    that drafts gave are drafted, and not among the generated ones.
    """
    if "waste/tokens_generated" not in series:
        return None
    steps, generated = series["waste/tokens_generated"]
    if not np.isfinite(generated).any():
        return None

    def tokens(metric: str) -> float:
        """Returns the tokens of a metric that is a share of each step's generated tokens."""
        return float(np.nansum(at_steps(series, metric, steps) * generated))

    dropped_each = at_steps(series, "zero_variance/dynamic_dropped_tokens", steps)
    dropped_each += at_steps(series, "rollout/dropped_tokens", steps)  # by a user's step policy
    unknown_each = at_steps(series, "reward/unknown_frac", steps) * (generated - dropped_each)
    signals = {name: tokens(f"waste/frac_{name}_signal") for name in SIGNALS}
    total, dropped = float(np.nansum(generated)), float(np.nansum(dropped_each))
    rest = max(0.0, total - dropped - sum(signals.values()))
    without_verdict = min(rest, float(np.nansum(unknown_each)))
    filtered = series.get("waste/filter_tokens")
    return {
        "filter": _last(filtered[1]) if filtered else 0,
        "drafted": round(float(at_steps(series, "waste/tokens_drafted", steps).sum())),
        "generated": round(total),
        "dropped": round(dropped),
        "unknown": round(without_verdict),
        **{name: round(x) for name, x in signals.items()},
        "silent": round(rest - without_verdict),
        "stages": _stages(series, signals, _last(filtered[1]) if filtered else 0),
    }


def at_steps(series: Series, name: str, steps: np.ndarray) -> np.ndarray:
    """Returns a metric's values at `steps`, and 0 at steps without a logged value."""
    values = np.zeros(len(steps))
    if name in series:
        logged_steps, logged = series[name]
        _, to, at = np.intersect1d(steps, logged_steps, return_indices=True)
        values[to] = np.nan_to_num(logged[at])
    return values


def cumulative_tokens(series: Series, ends: list[int]) -> list[int]:
    """Returns the tokens generated up to each of the steps `ends`, with the filter's."""
    if "waste/tokens_generated" not in series:
        return []
    steps, generated = series["waste/tokens_generated"]
    filtered = series.get("waste/filter_tokens")
    sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(generated))])
    sums += _last(filtered[1]) if filtered else 0
    return [round(float(sums[np.searchsorted(steps, end, side="right")])) for end in ends]


def _last(values: np.ndarray) -> int:
    finite = values[np.isfinite(values)]
    return round(float(finite[-1])) if len(finite) else 0


def _stages(series: Series, signals: dict[str, float], filtered: int) -> list[JsonObject]:
    """Returns the effect of each stage: skipped and rescued groups, trained-on and spent tokens;
    None for a number that a stage does not have. Stages without effect are left out.
    """

    def groups(name: str) -> int:
        return round(total(series, f"zero_variance/{name}"))

    def screened(name: str) -> int:
        return round(total(series, f"screening/{name}"))

    rows = [
        ("Offline filter", None, None, None, filtered),
        ("Selection", groups("skipped_prompts"), None, None, 0),
        (
            "Dynamic sampling",
            groups("dynamic_dropped_groups"),
            None,
            None,
            groups("dynamic_dropped_tokens"),
        ),
        ("Growth", None, groups("grow_rescued_groups"), None, groups("grow_tokens")),
        (
            "Screening",
            screened("stopped_groups"),
            screened("rescued_groups"),
            None,
            screened("continued_tokens"),
        ),
        (
            "Earlier groups",
            None,
            round(total(series, "earlier/groups")),
            round(total(series, "earlier/tokens")),
            0,
        ),
        ("Shaping", None, None, round(signals["shaping"]), 0),
        ("RL-ZVP (entropy)", None, None, round(signals["entropy"]), 0),
        ("Predicted pass rates", None, None, round(signals["prediction"]), 0),
    ]
    names = ("name", "skipped", "rescued", "taught", "cost")
    return [dict(zip(names, row, strict=True)) for row in rows if any(row[1:])]
