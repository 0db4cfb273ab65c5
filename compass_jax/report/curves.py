"""The table of a run, and the picture of its curves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from compass_jax.aliases import JsonMapping
from compass_jax.report.metrics import ReportError, read_metrics
from compass_jax.runs.logfile import replaced
from compass_jax.runs.metric_table import Panel, panels_of

# Colours that colour-blind readers can tell apart (Okabe and Ito); the page has separate values.
COLOURS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "red": "#D55E00",
    "sky": "#56B4E9",
    "grey": "#B8B8B8",
    "purple": "#8D5FA8",
}

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


def plot_curves(
    metrics_jsonl: str | os.PathLike, png: str | os.PathLike, stage: str = "rl", title: str = ""
) -> None:
    """Draws the panels of a stage (runs/metric_table.py) into a picture, which replaces an earlier
    one atomically.

    Panels without a logged metric are left out. Raises ReportError if the file has no metric of the
    stage to draw.
    """
    # needs no display and no global figure
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = read_metrics(metrics_jsonl, stage)
    panels = panels_of(series)
    if not panels:
        raise ReportError(f"{metrics_jsonl} has no metrics of stage {stage!r} to draw")
    rows, columns = -(-len(panels) // 4), min(4, len(panels))
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows + HEAD), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw=_grid(rows, columns)).flat
    for panel, place in zip(panels, axes):
        _draw(panel, place, series)
    for place in axes[len(panels) :]:
        place.set_axis_off()
    figure.suptitle(
        title or f"{Path(metrics_jsonl).absolute().parent.name}: {stage}",
        y=1 - 0.1 / figure.get_figheight(),
        fontsize=14,
        fontweight="bold",
    )
    with replaced(Path(png)) as temporary:
        figure.savefig(temporary, format="png")


# Inches of a panel with its labels, of the parts beside its axes, and of the picture's title. A
# layout that measures every label takes half of the time of a picture.
WIDTH, HEIGHT, HEAD = 4.0, 3.5, 0.3
LEFT, RIGHT, BOTTOM, TOP = 1.25, 0.1, 0.6, 0.4


def _grid(rows: int, columns: int) -> dict[str, float]:
    """Returns the places of `rows` x `columns` panels, as matplotlib's GridSpec takes them."""
    width, height = WIDTH * columns, HEIGHT * rows + HEAD
    return {
        "left": LEFT / width,
        "right": 1 - RIGHT / width,
        "bottom": BOTTOM / height,
        "top": 1 - (TOP + HEAD) / height,
        "wspace": (LEFT + RIGHT) / (WIDTH - LEFT - RIGHT),
        "hspace": (BOTTOM + TOP) / (HEIGHT - BOTTOM - TOP),
    }


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the centred mean of finite values over `window` neighbours, fewer at the ends."""
    half = window // 2
    return np.asarray([_mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])


def _draw(panel: Panel, axes: Any, series: Mapping) -> None:
    axes.set_title(panel.title)
    axes.set_ylabel(panel.unit)
    axes.set_xlabel("step")
    have = [
        (*series[name], label, COLOURS[colour])
        for name, label, colour in panel.lines
        if name in series
    ]
    if panel.scale == "stacked":
        _stack(axes, have)
    else:
        for steps, values, label, colour in have:
            _line(axes, steps, values, label, colour)
        if len(panel.lines) > 1:
            axes.legend(frameon=False, fontsize=9)
    if panel.scale == "log" and all(np.any(values > 0) for _, values, _, _ in have):
        axes.set_yscale("log")
    elif panel.scale in ("share", "stacked"):
        axes.set_ylim(0, 1 if panel.scale == "stacked" else _share_limit(have))
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:.3g}" if y < 0.01 else f"{y:.0%}")
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
        if panel.scale == "time" and (limit := _usual_limit(have)):
            axes.set_ylim(0, limit)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _share_limit(have: list[tuple]) -> float:
    """Returns the upper end of an axis of shares: 1, or less if all shares are small."""
    highest = max((float(np.nanmax(values, initial=0)) for _, values, _, _ in have), default=0)
    return 1.02 if highest > 0.35 or not highest else 1.15 * highest


def _usual_limit(have: list[tuple]) -> float:
    """Returns the upper end of an axis that cuts a few values far above all others (a first step
    compiles), or 0 without such values.
    """
    values = np.concatenate([x[np.isfinite(x)] for _, x, _, _ in have])
    if len(values) < 8 or values.max() <= 2.5 * (usual := float(np.quantile(values, 0.9))):
        return 0
    return 1.5 * usual


def _line(axes: Any, steps: np.ndarray, values: np.ndarray, label: str, colour: str) -> None:
    """Draws the values as a faint line, and their moving mean as a strong one."""
    window = len(values) // 20
    if window > 1:
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
        values = smooth(values, window)
    axes.plot(steps, values, color=colour, linewidth=2, label=label)


def _stack(axes: Any, have: list[tuple]) -> None:
    """Draws smoothed shares of a total, stacked; all of them have the same steps."""
    steps, first = have[0][0], have[0][1]
    window = max(1, len(first) // 20)
    layers = [smooth(np.nan_to_num(values), window) for _, values, _, _ in have]
    axes.stackplot(
        steps, layers, labels=[x[2] for x in have], colors=[x[3] for x in have], linewidth=0
    )
    axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    axes.legend(loc="lower left", fontsize=9, framealpha=0.85)
