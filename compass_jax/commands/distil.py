"""`compass distil`: long-CoT data from a teacher."""

from __future__ import annotations

from functools import partial
from typing import Any

from rich.console import Console

from compass_jax.commands.configured import keep_compiled
from compass_jax.commands.options import Distil
from compass_jax.curate.distil import distil
from compass_jax.report import summary_table


def run(options: Distil) -> int:
    """Generates the data, writes the folder, and prints pass rates and costs; returns the exit
    status.
    """
    console = Console(soft_wrap=True)
    tell = partial(console.print, highlight=False, markup=False)
    if not options.settings.endpoint:
        keep_compiled(options)
    report = distil(options.settings, options.out, tell)
    console.print(summary_table([*_rows(report["labels"]), _line("all", report)]))
    failed = ", ".join(f"{name} {count}" for name, count in report["failures"].items())
    if failed:
        tell(f"answers that did not come: {failed}; the same command asks for them again")
    tell(f"kept {report['kept']:,} conversations: {options.out}/train.jsonl")
    return 0


def _rows(labels: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [_line(label, counts) for label, counts in labels.items()]


def _line(name: str, counts: dict[str, Any]) -> dict[str, Any]:
    rate, cost = counts["pass_rate"], counts["tokens_a_kept_answer"]
    return {
        "prompts of": name,
        **{key: counts[key] for key in ("prompts", "solved", "answers", "right", "cut", "kept")},
        "pass rate": "-" if rate is None else f"{rate:.3f}",
        "tokens": counts["tokens"],
        "tokens a kept one": "-" if cost is None else f"{cost:.0f}",
    }
