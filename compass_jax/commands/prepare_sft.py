"""`compass prepare-sft`: filters duplicates, contamination and bad answers from conversations."""

from __future__ import annotations

from functools import partial

from rich.console import Console

from compass_jax.commands.options import PrepareSft
from compass_jax.curate.prepare import prepare
from compass_jax.curate.report import overlaps, table
from compass_jax.report import summary_table


def run(options: PrepareSft) -> int:
    """Filters the conversations, writes the folder and prints the counts; returns the exit
    status.
    """
    console = Console(soft_wrap=True)
    tell = partial(console.print, highlight=False, markup=False)
    tally = prepare(options.settings, options.out, tell)
    console.print(summary_table(table(tally), title=f"{tally.rows:,} rows"))
    for line in overlaps(tally):
        tell(line)
    if options.settings.reward:
        tell(f"{tally.judged} answers were judged; {tally.unjudged} without a verdict stay")
    tell(f"kept {tally.kept:,} rows: {options.out}/train.jsonl; examples: {options.out}/report.md")
    return 0
