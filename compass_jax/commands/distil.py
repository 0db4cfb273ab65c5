"""`compass distil`: long-CoT data from a teacher."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from compass_jax.commands.options import (
    add_option,
    add_settings,
    keep_programs,
    programs_option,
    settings_of,
)
from compass_jax.config.distil import DistilConfig

HELP = (
    "sample answers of a teacher, at an endpoint or in our own engine, and keep those that a "
    "verifier finds right, as conversations for sft; the same command goes on after a stop"
)


def options(parser: argparse.ArgumentParser) -> None:
    """The folder that is written, and the settings."""
    text = "This folder gets train.jsonl, answers.jsonl and report.json"
    add_option(parser, "out", text, required=True, metavar="DIR")
    add_settings(parser, DistilConfig)
    programs_option(parser)


def run(args: argparse.Namespace) -> int:
    """Writes the folder, and prints pass rates and costs."""
    from rich.console import Console

    from compass_jax.curate.distil import distil
    from compass_jax.report import summary_table

    console = Console(soft_wrap=True)
    tell = partial(console.print, highlight=False, markup=False)
    if not args.endpoint:
        keep_programs(args)
    found = distil(settings_of(args, DistilConfig), args.out, tell)
    console.print(summary_table([*_rows(found["labels"]), _line("all", found)]))
    failed = ", ".join(f"{name} {count}" for name, count in found["failures"].items())
    if failed:
        tell(f"answers that did not come: {failed}; the same command asks for them again")
    tell(f"kept {found['kept']:,} conversations: {args.out}/train.jsonl")
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
