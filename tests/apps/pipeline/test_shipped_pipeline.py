"""The shipped pipeline, with few rows and steps: every stage of configs/compass_max_tiny_cpu.py
runs, and the judge that it trained rewards its second phase.
"""

import dataclasses
import json
from pathlib import Path

import pytest
from evolve import evolve

from compass_jax.apps.pipeline.run import run_pipeline
from compass_jax.apps.pipeline.stages import Pipeline, Stage
from compass_jax.apps.pipeline.work import evaluate, rl, rows, sft, train_judge
from compass_jax.commands.configured import load_config_as

CONFIG = str(Path(__file__).parents[3] / "configs" / "compass_max_tiny_cpu.py")
FEW = {
    "asked-chains": {"each": 2},
    "asked-prices": {"each": 1},
    "facts": {"reads": 20},
    "chains": {"each": 40},
    "orders": {"each": 8},
    "base-chains": {"each": 40},
    "base-orders": {"each": 8},
    "pairs": {"each": 12, "copies": 2},
}


RUNS = {
    sft: {"sft": {"steps": 3, "batch": 16}},
    train_judge: {"sft": {"steps": 40, "batch": 16}, "data": {"eval_prompts": 8}}
    | {"rl": {"steps": 1, "prompts_per_step": 4, "group_size": 2}},
    rl: {"rl": {"steps": 1, "prompts_per_step": 8, "group_size": 4}},
    evaluate: {"evaluation": {"k": 1}},
}


def smaller(stage):
    """Returns the stage with few rows and steps. The judge only learns to answer with one of its
    words.
    """
    settings = stage.settings
    if stage.function is rows:
        settings = settings | FEW[stage.name]
    if stage.function in RUNS:
        settings = settings | {"run": evolve(settings["run"], **RUNS[stage.function])}
    return dataclasses.replace(stage, settings=settings)


@pytest.mark.slow
def test_every_stage_of_the_shipped_pipeline_runs(tmp_path):
    pipeline = load_config_as(CONFIG, Pipeline, str(tmp_path))
    names = [stage.name for stage in pipeline.stages]
    assert names.index("rl-reasoning") < names.index("judge") < names.index("rl-domain")
    assert "merged" in names
    pipeline.stages = [smaller(stage) for stage in pipeline.stages]
    assert run_pipeline(pipeline, do=Stage.run) == 0
    (line,) = (tmp_path / "19-rl-domain" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)["metrics"]
    assert metrics["reward/judge_refused/mean"] == 0  # no question is too long for the judge
    assert metrics["reward/judge_unparsable/mean"] < 1
    assert 0 <= metrics["reward/gold/mean"] <= 1
    run = json.loads((tmp_path / "19-rl-domain" / "config.json").read_text())
    assert run["rewards"]["judge"]["weights"] == str(tmp_path / "18-judge" / "rl")
    table = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert {"merged", "rl-reasoning", "rl-domain"} <= table.keys()
    assert (tmp_path / "21-export" / "hf" / "config.json").is_file()
