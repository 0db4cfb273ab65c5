"""The report of a run: a table and a page."""

from __future__ import annotations

from compass_jax.runs.report.command import run_report, watch_report
from compass_jax.runs.report.metrics import ReportError, read_metrics
from compass_jax.runs.report.table import run_rows, summary_table

__all__ = [
    "ReportError",
    "read_metrics",
    "run_report",
    "run_rows",
    "summary_table",
    "watch_report",
]
