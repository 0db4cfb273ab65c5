"""A reader's folder: links to the files of a clone, and demo runs with tiny random weights."""

from pathlib import Path

import pytest
from tiny import random_params

from compass_jax.commands.cli import main
from compass_jax.config import ModelConfig, MoEConfig
from compass_jax.weights.hf import save_params

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=384,
    hidden=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    ffn=32,
    moe=MoEConfig(experts=4, top_k=2, ffn=16),
    max_positions=512,
)


@pytest.fixture(scope="session")
def reader(tmp_path_factory):
    """Returns the folder; tests of pages work in copies of it."""
    home = tmp_path_factory.mktemp("reader")
    for name in ("configs", "launch", "examples", "Makefile"):
        if (ROOT / name).exists():
            (home / name).symlink_to(ROOT / name)
    tokenizer = ROOT / "configs" / "tiny_tokenizer"
    model = home / "Qwen3-tiny"
    save_params(random_params(MODEL), MODEL, model, "float32", tokenizer_from=tokenizer)
    for name in ("sft", "rl"):
        assert main(["import-hf", str(model), str(home / "runs" / "demo" / name)]) == 0
    return home
