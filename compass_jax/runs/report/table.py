"""The table of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.table import Table

from compass_jax.base.aliases import JsonMapping

# Rows of the run table: label, metric, format.
_ROWS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("groups all right", "zero_variance/rate_all_right", "{:.1%}"),
    ("groups all wrong", "zero_variance/rate_all_wrong", "{:.1%}"),
    ("groups between", "groups/between_frac", "{:.1%}"),
    ("tokens: verifier", "waste/frac_verifier_signal", "{:.1%}"),
    ("tokens: shaping", "waste/frac_shaping_signal", "{:.1%}"),
    ("tokens: entropy", "waste/frac_entropy_signal", "{:.1%}"),
    ("tokens: none", "waste/frac_none", "{:.1%}"),
    ("entropy, nats", "entropy_nats", "{:.3f}"),
    ("response length, tokens", "response_length/mean", "{:.1f}"),
    ("mismatch, |d logp|", "mismatch/logp_abs_diff", "{:.1e}"),
    ("gradient norm", "grad_norm", "{:.3f}"),
    ("SFT loss, nats", "sft/loss", "{:.3f}"),
)


def summary_table(rows: Sequence[JsonMapping], title: str = "") -> Table:
    """Returns a table of rows with the same keys; floats have four significant digits."""
    table = Table(title=title or None, title_style="bold", title_justify="left")
    for i, name in enumerate(rows[0] if rows else ()):
        # a narrow terminal wraps numbers instead of dropping them
        table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    return table


def run_rows(series: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> list[dict[str, str]]:
    """Returns the mean of each known metric over the first and the last tenth of the steps."""
    rows = []
    for label, name, form in _ROWS:
        if name in series:
            values = series[name][1]
            tenth = max(1, len(values) // 10)
            parts = {"first 10%": values[:tenth], "last 10%": values[-tenth:]}
            rows.append(
                {"metric": label} | {part: form.format(_mean(x)) for part, x in parts.items()}
            )
    return rows


def without_verdict(series: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> str:
    """Returns the line below a run's table about samples without a verdict, or an empty text."""
    steps, shares = series.get("reward/unknown_frac", (np.array([]), np.array([])))
    lost = shares[shares > 0]
    if not lost.size:
        return ""
    return (
        f"in {lost.size} of {len(steps)} steps samples have no verdict and are left out, at most"
        f" {lost.max():.1%} of a step's and {np.nanmean(shares):.1%} in the mean"
        " (reward/unknown_frac)"
    )


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")
