"""A folder as a person has it at the top of a clone, with a tiny model of random weights."""

from pathlib import Path

import pytest
from tiny import random_params

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
    max_positions=160,
)


@pytest.fixture(scope="session")
def clone(tmp_path_factory):
    home = tmp_path_factory.mktemp("clone")
    for name in ("examples", "launch", "configs"):
        (home / name).symlink_to(ROOT / name)
    params = random_params(MODEL)
    tokenizer = ROOT / "configs" / "tiny_tokenizer"
    save_params(params, MODEL, home / "tiny-model", "float32", tokenizer_from=tokenizer)
    return home


@pytest.fixture
def at_home(clone, monkeypatch):
    monkeypatch.chdir(clone)
    return clone
