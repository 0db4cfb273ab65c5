"""A pipeline of seconds: rows, SFT on them, RL, evaluation and export of the tiny run's model."""

import dataclasses
from pathlib import Path

from tiny_run import tiny_run

from compass_jax.config import FileSource
from compass_jax.config.pipeline import PipelineConfig
from compass_jax.config.stages import Evaluate, Export, Rl, Rows, Sft

MADE = str(Path(__file__).with_name("made_rows.py"))


def tiny_pipeline(run_dir: str = "runs/tiny_pipeline") -> PipelineConfig:
    """Six stages of one to three steps."""
    run = dataclasses.replace(tiny_run(), trackers=(), show_samples_every=0)
    run = dataclasses.replace(
        run, sft=dataclasses.replace(run.sft, procedural=(), save_every=1, buckets=(56,))
    )
    asked = FileSource("stage:asked/rows.jsonl", label="asked", verifier="exact")
    sets = dataclasses.replace(run.data, eval_sources=(*run.data.sources, asked))
    return PipelineConfig(
        stages=(
            Rows("asked", f"{MADE}:asked", {"count": 6}),
            Rows("taught", f"{MADE}:taught", {"count": 12}),
            Sft("base", run),
            Rl("rl", run),
            Evaluate("measured", dataclasses.replace(run, data=sets), of=("base", "rl")),
            Export("exported", start="rl"),
        ),
        run_dir=run_dir,
    )
