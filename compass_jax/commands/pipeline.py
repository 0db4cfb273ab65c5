"""`compass pipeline`: runs training stages one after another, each from the results of earlier
ones.
"""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from compass_jax.commands.configured import load_config_as
from compass_jax.commands.options import Pipeline
from compass_jax.config import ConfigError
from compass_jax.config.pipeline import PipelineConfig
from compass_jax.distributed import require_single_process
from compass_jax.pipeline.plan import check_outside, lines
from compass_jax.pipeline.record import Record
from compass_jax.pipeline.results import results, results_table, status_table


def run(options: Pipeline) -> int:
    """Runs the pipeline; returns the exit status, which is 130 or 143 if a signal stopped it."""
    config = load_config_as(options.config, PipelineConfig)
    if options.out:
        config = replace(config, run_dir=options.out)
    try:
        config = config.validate()
    except ConfigError as error:
        raise ConfigError(f"{options.config}: {error}") from error
    require_single_process("compass pipeline")
    if options.dry_run or options.status:
        return _tell(config, options.status)
    from compass_jax.pipeline.run import run_pipeline

    return run_pipeline(config, list(options.redo), cache=options.compilation_cache)


def _tell(config: PipelineConfig, status: bool) -> int:

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
