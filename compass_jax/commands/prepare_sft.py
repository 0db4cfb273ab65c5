"""`compass prepare-sft`: conversations without duplicates, contamination and bad answers."""

from __future__ import annotations

import argparse
from functools import partial

from compass_jax.commands.options import add_option, add_settings, settings_of
from compass_jax.config.prepare import PrepareConfig

HELP = (
    "take duplicates, evaluation questions, broken and wrong answers out of conversations; the "
    "same command goes on after a stop"
)


def options(parser: argparse.ArgumentParser) -> None:
    """The folder that is written, and the settings."""
    text = "This folder gets train.jsonl, report.json and report.md"
    add_option(parser, "out", text, required=True, metavar="DIR")
    add_settings(parser, PrepareConfig)


def run(args: argparse.Namespace) -> int:
    """Writes the folder, and prints the counts."""
    from rich.console import Console

    from compass_jax.curate.prepare import prepare
    from compass_jax.curate.report import overlaps, table
    from compass_jax.report import summary_table

    console = Console(soft_wrap=True)
    tell = partial(console.print, highlight=False, markup=False)
    tally = prepare(settings_of(args, PrepareConfig), args.out, tell)
    console.print(summary_table(table(tally), title=f"{tally.rows:,} rows"))
    for line in overlaps(tally):
        tell(line)
    if args.reward:
        tell(f"{tally.judged} answers were judged; {tally.unjudged} without a verdict stay")
    tell(f"kept {tally.kept:,} rows: {args.out}/train.jsonl; examples: {args.out}/report.md")
    return 0
