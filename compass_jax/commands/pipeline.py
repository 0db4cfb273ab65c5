"""`compass pipeline`: stages of training one after another, each from what the others made."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from compass_jax.commands.options import add_option, programs_option

if TYPE_CHECKING:
    from compass_jax.config.pipeline import PipelineConfig

HELP = "run stages (SFT, merge, RL, evaluation, export) one after another; it goes on where it was"


def options(parser: argparse.ArgumentParser) -> None:
    """Writes the arguments down."""
    text = "This file is read, whose one public function returns a PipelineConfig; a path, or a "
    parser.add_argument("config", metavar="CONFIG", help=text + "name such as compass_max_tiny_cpu")
    text = "The stages write into this folder, in the place of the configuration's run_dir"
    add_option(parser, "out", text, metavar="DIR")
    text = "Runs this stage again, and those that take from it; their folders are renamed, and "
    text += "nothing is removed. It may come several times"
    add_option(parser, "redo", text, action="append", default=[], metavar="STAGE")
    text = "Checks everything, prints what each stage takes and makes, and ends"
    add_option(parser, "dry-run", text, action="store_true")
    text = "Prints how far each stage is and what has been measured, and ends"
    add_option(parser, "status", text, action="store_true")
    programs_option(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the pipeline; the exit status, 130 or 143 where a signal stopped it."""
    from compass_jax.commands.configured import made
    from compass_jax.config import ConfigError
    from compass_jax.config.pipeline import PipelineConfig
    from compass_jax.distributed import refuse

    config = made(args.config, PipelineConfig)
    if args.out:
        config = replace(config, run_dir=args.out)
    try:
        config = config.validate()
    except ConfigError as error:
        raise ConfigError(f"{args.config}: {error}") from error
    refuse("compass pipeline")
    if args.dry_run or args.status:
        return _tell(config, args.status)
    from compass_jax.pipeline.run import run_pipeline

    return run_pipeline(config, args.redo, cache=args.compilation_cache or "")


def _tell(config: PipelineConfig, status: bool) -> int:
    from rich.console import Console

    from compass_jax.pipeline.plan import check_outside, lines
    from compass_jax.pipeline.record import Record
    from compass_jax.pipeline.results import results, results_table, status_table

    record, console = Record(config), Console(soft_wrap=True, highlight=False)
    if not status:
        check_outside(config)
        for line in lines(record):
            console.print(line, markup=False)
        return 0
    console.print(status_table(record))
    if results(record):
        console.print(results_table(record))
    return 0
