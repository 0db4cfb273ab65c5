"""Presets on a machine that decodes fewer samples at once than a step of the paper has."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from evolve import evolve
from tiny_run import tiny_run

from compass_jax.config import apply
from compass_jax.config.io import config_to_json
from compass_jax.runs.rundir import recorded_sizes
from compass_jax.training.presets import PRESETS, describe_changes, fitted_preset, preset


@pytest.mark.parametrize(
    ("name", "slots", "sizes"),
    [
        ("grpo", 64, (4, 16)),
        ("grpo", 256, (8, 32)),
        ("grpo", 1024, (16, 64)),
        ("grpo", 8, (4, 8)),
        ("screened", 64, (16, 4)),
        ("screened", 1024, (128, 4)),
        ("screened", 8, (4, 4)),
        ("espo", 64, (8, 8)),
        ("gspo", 512, (64, 8)),
        ("espo", 4096, (128, 8)),
        ("compass_max", 64, (8, 8)),
        ("dapo", 64, (8, 8)),
        ("dapo", 16, (4, 8)),
    ],
)
def test_a_step_shrinks_as_a_whole_and_stays_a_baseline(name, slots, sizes):
    rl = fitted_preset(name, 256, slots, 10_000)
    assert (rl.prompts_per_step, rl.group_size) == sizes
    assert rl.prompts_per_step % rl.updates_per_rollout == 0
    paper = preset(name, 256)
    rollouts = paper.optim.warmup_steps // paper.updates_per_rollout
    assert rl.optim.warmup_steps == rollouts * rl.updates_per_rollout


@pytest.mark.parametrize("name", PRESETS)
def test_what_was_changed_is_said(name):
    paper, rl = preset(name, 256), fitted_preset(name, 256, 64, 10_000)
    line = describe_changes(name, rl, 256)
    assert f"prompts a step {rl.prompts_per_step} (preset: {paper.prompts_per_step})" in line
    assert ("samples of each" in line) == (rl.group_size != paper.group_size)
    assert describe_changes(name, paper, 256) == ""


def test_what_the_user_set_is_not_called_fitted():
    rl = replace(preset("screened", 256), prompts_per_step=16, group_size=3)
    line = describe_changes("screened", rl, 256, {"rl.group_size"})
    assert "prompts a step 16 (preset: 128), fitted to the model, the memory and the data" in line
    assert "samples" not in line and line.endswith("; set rl.prompts_per_step for others")
    both = {"rl.group_size", "rl.prompts_per_step"}
    assert describe_changes("screened", rl, 256, both) == ""


def test_few_prompts_are_all_in_a_step():
    rl = fitted_preset("espo", 256, 64, 3)
    assert (rl.prompts_per_step, rl.updates_per_rollout) == (3, 1)


def resized(config, overridden=()):
    return apply(config, recorded_sizes(Path(config.directory), overridden))


def test_a_run_that_has_begun_keeps_the_sizes_that_were_chosen(tmp_path):
    config = replace(tiny_run(), run_dir=str(tmp_path))
    rl = replace(config.rl, micro_batch_tokens=77, group_size=2, buckets=(48, 72))
    sizes = {"slots": 2, "prompt_buckets": (24, 56), "cache_bucket": 24}
    old = evolve(config, rl=rl, rollout=sizes)
    assert resized(config) == config
    (tmp_path / "config.json").write_text(config_to_json(old))
    assert resized(config) == config, "nothing was trained"
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"stage": "rl", "step": 1}) + "\n")
    assert resized(config) == old
    restored = resized(config, ["rl.group_size", "rollout.slots"])
    assert restored.rl.micro_batch_tokens == 77 and restored.rl.group_size == config.rl.group_size
    assert restored.rollout.slots == config.rollout.slots
