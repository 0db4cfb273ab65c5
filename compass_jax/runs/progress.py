"""The line of numbers that shows a run's progress."""

from __future__ import annotations

import math
from collections.abc import Mapping

COLUMNS = 80  # maximum columns of the progress line
# The parts of the progress line, if the step logs the metric: label, metric, format. Always:
_ALWAYS = (
    ("loss", "sft/loss", "{:.3f}"),
    ("loss", "scalar/loss", "{:.3f}"),
    ("reward", "reward/mean", "{:.3f}"),
)
# If they fit; the last ones are dropped first, then the rate and the time left:
_MORE = (("kl", "policy/kl_k3", "{:.1e}"), ("grad", "grad_norm", "{:.2f}"), ("lr", "lr", "{:.1e}"))
# shares of the step's tokens by their signal, one part of the line
_SIGNALS = {
    "verifier": "waste/frac_verifier_signal",
    "shaping": "waste/frac_shaping_signal",
    "entropy": "waste/frac_entropy_signal",
    "prediction": "waste/frac_prediction_signal",
    "none": "waste/frac_none",
}
_RATES = ("train/tokens_per_s", "rollout/tokens_per_s")  # the first one that a step has


def progress_text(metrics: Mapping[str, float], left_s: float, columns: int = COLUMNS) -> str:
    """Returns the progress line, of at most `columns` characters if possible: rate, time left
    (seconds; NaN is unknown), metrics of the step, and the shares of its tokens by signal.
    """
    rate = [f"{metrics[name]:,.0f} tok/s" for name in _RATES if name in metrics][:1]
    left = [f"{duration(left_s)} left"] if math.isfinite(left_s) else []
    main = [_part(metrics, *entry) for entry in _ALWAYS] + [_signals(metrics)]
    more = [_part(metrics, *entry) for entry in _MORE]
    main, more = ([part for part in parts if part] for parts in (main, more))
    while len(text := "  ".join([*rate, *left, *main, *more])) > columns:
        shrinks = more or rate or left
        if not shrinks:
            break
        shrinks.pop()
    return text


def _part(metrics: Mapping[str, float], label: str, name: str, form: str) -> str:
    return f"{label} {form.format(metrics[name])}" if name in metrics else ""


def _signals(metrics: Mapping[str, float]) -> str:
    """Returns "verifier 59% entropy 30% none 11%", with shaping and prediction unless they are
    0.
    """
    shares = {label: metrics[name] for label, name in _SIGNALS.items() if name in metrics}
    for label in ("shaping", "prediction"):
        if not shares.get(label):
            shares.pop(label, None)
    return " ".join(f"{label} {share:.0%}" for label, share in shares.items())


def duration(seconds: float) -> str:
    """Returns a duration as text: 42 s, 3 min 20 s, 2 h 05 min."""
    count = round(seconds)
    if count < 60:
        return f"{count} s"
    if count < 3600:
        return f"{count // 60} min {count % 60:02d} s"
    return f"{count // 3600} h {count % 3600 // 60:02d} min"
