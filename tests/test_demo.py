"""The demo's account of itself, and (slow) the whole demo with a few updates."""

import json
from pathlib import Path

import pytest

from compass_jax import demo
from compass_jax.evaluate import Evaluation
from compass_jax.weights.hf_config import read_hf_config


def evaluation(shift):
    labels = {"easy": (30, 0.5 + shift, 0.6 + shift), "hard": (10, 0.1 + shift, 0.0)}
    return Evaluation(4, 40, 0.4 + shift, 0.7, 0.45 + shift, 0, labels)


def test_the_table_has_a_row_for_each_difficulty_and_one_for_all():
    rows = demo.difficulty_rows(evaluation(0.0), evaluation(0.25))
    assert [row["task"] for row in rows] == ["easy", "hard", "all"] and [
        row["prompts"] for row in rows
    ] == [30, 10, 40]
    assert (rows[0]["SFT avg@4"], rows[0]["RL avg@4"], rows[1]["RL greedy"]) == (0.5, 0.75, 0.0)
    assert (rows[2]["SFT avg@4"], rows[2]["RL avg@4"], rows[2]["RL greedy"]) == (0.4, 0.65, 0.7)


def test_both_runs_share_everything_but_their_place_and_start(tmp_path):
    sft, rl = demo.demo_configs(tmp_path, 7, demo.Quick(3, 5, 512))
    assert (sft.seed, rl.seed, sft.sft.steps, rl.rl.steps) == (7, 7, 3, 5)
    assert (
        rl.init_from == sft.run_dir == str(tmp_path / "sft")
        and rl.run_dir == str(tmp_path / "rl")
        and sft.data == rl.data
    )
    rl.validate_for_rl()
    moe = rl.model.moe
    assert (
        moe.experts >= 8
        and moe.top_k == 2
        and rl.model.layers >= 4
        and rl.rl.replay == "R3"
        and rl.rl.objective.name == "espo"
    )


@pytest.mark.slow
def test_the_quick_demo_ends_with_a_summary_an_export_and_a_picture(tmp_path):
    summary = demo.run_demo(str(tmp_path), seed=3, quick=True)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    expected = {"sft_avg_at_4", "rl_avg_at_4", "sft_greedy", "rl_greedy", "wall_s"}
    assert expected <= summary.keys()
    assert summary["heldout_prompts"] == 64 and 0 <= summary["rl_avg_at_4"] <= 1
    exported = Path(summary["hf_dir"])
    assert (
        read_hf_config(exported) == demo.demo_configs(tmp_path, 3)[1].model
        and (exported / "tokenizer.json").is_file()
    )
    assert (tmp_path / "curves.png").stat().st_size > 20_000
    # a finished demo is only read again
    again = demo.run_demo(str(tmp_path), seed=3, quick=True)
    assert again["rl_avg_at_4"] == summary["rl_avg_at_4"]
