"""The line of numbers that a person watches."""

from __future__ import annotations

import math
from collections.abc import Mapping

COLUMNS = 80  # of the progress line
# What the progress line shows, where a step has it: label, metric, format. These always,
_ALWAYS = (
    ("loss", "sft/loss", "{:.3f}"),
    ("loss", "scalar/loss", "{:.3f}"),
    ("reward", "reward/mean", "{:.3f}"),
)
# these where they fit: the last ones go first, then the rate and the time left
_MORE = (
    ("kl", "policy/kl_k3", "{:.1e}"),
    ("grad", "grad_norm", "{:.2f}"),
    ("lr", "lr", "{:.1e}"),
)
# what the tokens of a step learnt from: their shares are one part of the line
_SIGNALS = {
    "verifier": "waste/frac_verifier_signal",
    "shaping": "waste/frac_shaping_signal",
    "entropy": "waste/frac_entropy_signal",
    "none": "waste/frac_none",
}
_RATES = ("train/tokens_per_s", "rollout/tokens_per_s")  # the first that a step has


def progress_text(metrics: Mapping[str, float], left_s: float, columns: int = COLUMNS) -> str:
    """One line of what a person watches, of at most `columns` characters where that is possible:
    rate, time left (seconds; NaN is unknown), the metrics of the step that are there, and from what
    its tokens learnt.
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
    """ "verifier 59% entropy 30% none 11%"; shaping where there is any."""
    shares = {label: metrics[name] for label, name in _SIGNALS.items() if name in metrics}
    if not shares.get("shaping"):
        shares.pop("shaping", None)
    return " ".join(f"{label} {share:.0%}" for label, share in shares.items())


def duration(seconds: float) -> str:
    """42 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
