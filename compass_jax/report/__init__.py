"""The report of a run: a table, a picture of its curves, and a page."""

from __future__ import annotations

from compass_jax.report.command import run_report, watch_report
from compass_jax.report.curves import plot_curves, run_rows, smooth, summary_table
from compass_jax.report.metrics import ReportError, read_metrics

__all__ = [
    "ReportError",
    "plot_curves",
    "read_metrics",
    "run_report",
    "run_rows",
    "smooth",
    "summary_table",
    "watch_report",
]
