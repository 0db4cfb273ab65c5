"""examples/one_page_rl.py: a few steps on a CPU improve the model that it trains."""

import re
import runpy
import sys
from pathlib import Path

import jax
import numpy as np

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.weights.hf import load_params
from compass_jax.weights.hf_config import read_hf_config

SCRIPT = Path(__file__).parents[2] / "examples" / "one_page_rl.py"


def test_one_page_raises_the_reward_and_writes_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(SCRIPT))["make_tiny_model"](Path("start"))
    words = ["start", "better", "--steps", "12", "--learning-rate", "0.02"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    rewards = [float(x) for x in re.findall(r"^step \d+: reward ([\d.]+)", printed, re.M)]
    mismatches = [float(x) for x in re.findall(r"mismatch ([\de.+-]+)", printed)]
    assert len(rewards) == len(mismatches) == 12
    assert np.mean(rewards[-3:]) > 2 * np.mean(rewards[:3])
    assert max(mismatches) < 1e-5  # rows, masks, log-probs and routes belong together

    shape = read_hf_config("better")
    assert shape == read_hf_config("start")
    before, after = (load_params(x, shape, "float32") for x in ("start", "better"))
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (before, after)))]
    assert min(moved) > 0
    assert Tokenizer.load("better").vocab_size == Tokenizer.load("start").vocab_size


def test_the_page_stays_a_page():
    lines = SCRIPT.read_text().splitlines()
    assert len(lines) <= 250 and sum("Left out" in line for line in lines) >= 5
