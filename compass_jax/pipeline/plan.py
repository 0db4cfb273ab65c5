"""What is looked at before the first stage starts, and what a pipeline will do, in words."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator

from compass_jax.config import ConfigError, FileSource
from compass_jax.config.named import load
from compass_jax.config.pipeline import REFERENCE, PipelineConfig, inputs
from compass_jax.config.stages import Evaluate, Prepare, Rl, Rows, Run, Sft, Stage
from compass_jax.pipeline.record import Record


def check_outside(config: PipelineConfig) -> None:
    """Raises ConfigError, naming stage and setting, for a file or function that a stage names and
    that is not there.
    """
    for stage in config.stages:
        if isinstance(stage, Rows):
            load(stage.function, f"stage {stage.name}: function")
        for key, path, folder in _paths(stage):
            if path.startswith(REFERENCE):
                continue
            # of a pattern one file is enough; its rows may lie in a folder
            if not (os.path.isdir(path) if folder else os.path.exists(path) or glob.glob(path)):
                kind = "folder" if folder else "file"
                raise ConfigError(f"stage {stage.name}: {key} = {path!r:.200}: no such {kind}")


def _paths(stage: Stage) -> Iterator[tuple[str, str, bool]]:
    """(setting, path, whether it is a folder) of what a stage reads."""
    if isinstance(stage, Prepare):
        for key in ("data", "against"):
            for i, path in enumerate(getattr(stage.settings, key)):
                yield f"settings.{key}[{i}]", path, False
    if not isinstance(stage, Run):
        return
    run = stage.run
    folders = {"run.data.tokenizer": run.data.tokenizer, "run.init_from": run.init_from}
    for key, path in folders.items():
        if path:
            yield key, path, True
    if isinstance(stage, Sft):
        for key in ("files", "preferences"):
            for i, path in enumerate(getattr(run.sft, key)):
                yield f"run.sft.{key}[{i}]", path, False
    if isinstance(stage, Rl | Evaluate):
        for key, source in run.data.keyed_sources():
            if isinstance(source, FileSource):
                yield f"run.{key}.path", source.path, False
    if isinstance(stage, Rl) and run.data.keep_file:
        yield "run.data.keep_file", run.data.keep_file, False


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
