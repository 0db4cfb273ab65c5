"""The demo's account of itself, and (slow) the whole demo with a few updates."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from compass_jax.commands import demo
from compass_jax.commands.comparison import record_of
from compass_jax.experience.evaluate import Evaluation
from compass_jax.report import summary_table
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


def test_the_end_shows_the_run_beside_the_recorded_one_on_one_screen(tmp_path, monkeypatch):
    steps = {
        "waste/tokens_generated": [400.0, 600.0],
        "groups/varied_frac": [0.75, 0.75],
        "waste/frac_verifier_signal": [0.5, 1.0],
        "waste/frac_shaping_signal": [0.25, 0.0],
        "waste/frac_entropy_signal": [0.25, 0.0],
        "waste/frac_none": [0.0, 0.0],
    }
    series = {name: (np.arange(2), np.array(x)) for name, x in steps.items()}
    recorded = record_of(7, series, [(0.0, 0.2), (1000.0, 0.4)])
    (tmp_path / "grpo.json").write_text(
        json.dumps({"command": "c", "commit": "abc", "runs": [recorded]})
    )
    monkeypatch.setattr(demo, "GRPO", tmp_path / "grpo.json")
    rl = demo.demo_configs(tmp_path, 7)[1]
    (tmp_path / "rl").mkdir()
    lines = [
        {"step": i, "stage": "rl", "metrics": {name: x[i] for name, x in steps.items()}}
        for i in range(2)
    ]

    def shown(count):
        text = "".join(json.dumps(line) + "\n" for line in lines[:count])
        (tmp_path / "rl" / "metrics.jsonl").write_text(text)
        found = demo.against_grpo(rl, evaluation(0.0), evaluation(0.25))
        console = Console(width=80, file=io.StringIO())
        console.print(summary_table(found.rows, title=found.title))
        return found, console.file.getvalue()

    found, screen = shown(1)
    assert found.rows[2] == {
        "": "tokens with the verifier's signal",
        "this run": "50%",
        "plain GRPO": "50%",
    }
    for text in ("at equal generated tokens", "0.400 -> 0.650", "0.200 -> 0.280"):
        assert text in screen
    assert "recorded before, with seed 7:\n  c, commit abc" in found.note
    lines.append(lines[0])  # a run that generates more than the recorded one
    found, screen = shown(3)
    assert "ended earlier" in screen and "equal" not in screen and "0.200 -> 0.400" in screen


@pytest.mark.slow
def test_the_quick_demo_ends_with_a_summary_a_comparison_an_export_and_a_picture(tmp_path):
    summary = demo.run_demo(str(tmp_path), seed=3, quick=True)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    expected = {"sft_avg_at_4", "rl_avg_at_4", "sft_greedy", "rl_greedy", "wall_s"}
    assert expected <= summary.keys()
    assert summary["heldout_prompts"] == 64 and 0 <= summary["rl_avg_at_4"] <= 1
    rows = {row.pop(""): row for row in summary["against_grpo"]}
    ours, theirs = (int(x.replace(",", "")) for x in rows["generated tokens"].values())
    assert 0 < ours <= theirs < ours + 30_000  # up to the recorded step that reaches them
    exported = Path(summary["hf_dir"])
    assert (
        read_hf_config(exported) == demo.demo_configs(tmp_path, 3)[1].model
        and (exported / "tokenizer.json").is_file()
    )
    assert (tmp_path / "curves.png").stat().st_size > 20_000
    # a finished demo is only read again
    again = demo.run_demo(str(tmp_path), seed=3, quick=True)
    assert again["rl_avg_at_4"] == summary["rl_avg_at_4"]
