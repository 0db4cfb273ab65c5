"""What is looked at before the first stage starts, and what a pipeline will do, in words."""

from __future__ import annotations

import glob
import os

from compass_jax.config import ConfigError
from compass_jax.config.named import load
from compass_jax.config.pipeline import REFERENCE, PipelineConfig, inputs, paths
from compass_jax.config.stages import Rows
from compass_jax.pipeline.record import Record


def check_outside(config: PipelineConfig) -> None:
    """Raises ConfigError, naming stage and setting, for a file or function that a stage names and
    that is not there.
    """
    for stage in config.stages:
        if isinstance(stage, Rows):
            load(stage.function, f"stage {stage.name}: function")
        for key, path, folder in paths(stage):
            if path.startswith(REFERENCE):
                continue
            # of a pattern one file is enough; its rows may lie in a folder
            if not (os.path.isdir(path) if folder else os.path.exists(path) or glob.glob(path)):
                kind = "folder" if folder else "file"
                raise ConfigError(f"stage {stage.name}: {key} = {path!r:.200}: no such {kind}")


def lines(record: Record) -> list[str]:
    """A line for each stage: what it takes, what it makes, and whether it is done."""
    stale, found = record.stale(), []
    for number, stage in enumerate(record.config.stages, 1):
        taken = ", ".join(inputs(stage)) or "nothing"
        state = f"stale ({stale[stage.name]})" if stage.name in stale else record.state(stage.name)
        kind = type(stage).__name__.lower()
        makes = record.output(stage.name)
        found.append(f"{number} {stage.name}: {kind} of {taken} -> {makes}; {state}")
    return found
