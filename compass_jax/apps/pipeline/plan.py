"""The checks before the first stage starts, and the lines of --dry-run."""

from __future__ import annotations

import glob
import os

from compass_jax.apps.pipeline.record import Record
from compass_jax.config import ConfigError
from compass_jax.config.named import load
from compass_jax.config.pipeline import PipelineConfig, inputs
from compass_jax.config.stages import REFERENCE, Rows, Sft
from compass_jax.data.files import label_among


def check_outside(config: PipelineConfig) -> None:
    """Raises ConfigError, naming stage and setting, for a missing file or function, and for weights
    that do not match the labels of the rows.
    """
    record = Record(config)
    for stage in config.stages:
        if isinstance(stage, Sft) and stage.run.sft.weights:
            check_weights(stage, record)
        if isinstance(stage, Rows):
            load(stage.function, f"stage {stage.name}: function")
        for key, path, folder in stage.reads():
            if path.startswith(REFERENCE):
                continue
            # one file must match a pattern; rows may be in a folder
            if not (os.path.isdir(path) if folder else os.path.exists(path) or glob.glob(path)):
                kind = "folder" if folder else "file"
                raise ConfigError(f"stage {stage.name}: {key} = {path!r:.200}: no such {kind}")


def check_weights(stage: Sft, record: Record) -> None:
    """Raises ConfigError if the names in `sft.weights` are not the labels of the stage's rows; the
    message has the files of each label.
    """
    placed_stage = record.placed(stage)
    assert isinstance(placed_stage, Sft)
    sft, placed = stage.run.sft, placed_stage.run.sft
    weights = dict(placed.weights)
    files_of: dict[str, list[str]] = {row[0]: [] for row in (*sft.procedural, *sft.answers)}
    for key in ("files", "preferences"):
        for name, path in zip(getattr(sft, key), getattr(placed, key), strict=True):
            files_of.setdefault(label_among(path, weights), []).append(name)
    if files_of.keys() == weights.keys():
        return
    written_as = dict(zip(weights, (label for label, _ in sft.weights), strict=True))
    labels = [
        written_as.get(label, label) + (f" ({', '.join(files)})" if files else "")
        for label, files in sorted(files_of.items())
    ]
    raise ConfigError(
        f"stage {stage.name}: run.sft.weights names {', '.join(written_as.values())}, and the rows"
        f" have the labels {', '.join(labels)}: give each of them a weight, and no other. A file"
        " that has its label in common with another is named as run.sft.files writes it"
    )


def lines(record: Record) -> list[str]:
    """Returns a line for each stage: its inputs, its output, and whether it is done."""
    stale, lines = record.stale(), []
    for number, stage in enumerate(record.config.stages, 1):
        sources = ", ".join(inputs(stage)) or "nothing"
        state = f"stale ({stale[stage.name]})" if stage.name in stale else record.state(stage.name)
        kind = type(stage).__name__.lower()
        output = record.output(stage.name)
        lines.append(f"{number} {stage.name}: {kind} of {sources} -> {output}; {state}")
    return lines
