"""Upcycling of a dense model: the same function with experts, as transformers computes it."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from compass_jax.commands.cli import main
from compass_jax.weights.upcycle import upcycle

SIZES = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
DENSE = {
    "llama": LlamaConfig(**SIZES, rope_theta=5000.0),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=10),
    "qwen3": Qwen3Config(**SIZES, head_dim=10, tie_word_embeddings=True),
}


def write_dense(folder, name, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DENSE[name], dtype=dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)
    return str(folder)


def logits(folder):
    tokens = torch.arange(40).reshape(2, 20) % 97
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("name", DENSE)
def test_without_noise_the_logits_are_those_of_the_dense_model(tmp_path, name):
    dense = write_dense(tmp_path / "dense", name)
    sparse = upcycle(dense, tmp_path / "sparse", experts=5, top_k=3)
    expected = logits(dense)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits(sparse), expected, rtol=1e-4, atol=1e-4)


def test_the_command_adds_noise_of_the_given_size_and_repeats_itself(tmp_path, capsys):
    dense = write_dense(tmp_path / "dense", "llama")
    words = ["--experts", "4", "--top-k", "2", "--noise", "0.1", "--seed", "7"]
    for out in ("a", "b"):
        assert main(["upcycle", dense, str(tmp_path / out), *words]) == 0
    assert "compass train --model" in capsys.readouterr().out
    a, b = (load_file(tmp_path / out / "model.safetensors") for out in ("a", "b"))
    assert all(np.array_equal(a[name], b[name]) for name in a)
    source = load_file(f"{dense}/model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    experts = [a[f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight"] for e in range(4)]
    for expert in experts:
        assert 0.09 < (expert - source).std() / source.std() < 0.11
    assert not np.array_equal(experts[0], experts[1])
    router = a["model.layers.1.block_sparse_moe.gate.weight"]
    assert router.shape == (4, 48) and 0.01 < router.std() < 0.03


def test_the_types_of_the_weights_stay(tmp_path):
    dense = write_dense(tmp_path / "dense", "qwen3", torch.bfloat16)
    sparse = upcycle(dense, tmp_path / "sparse", experts=2, top_k=1)
    assert {str(x.dtype) for x in load_file(sparse / "model.safetensors").values()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--experts", "1"], "model.moe.experts = 1"),
        (["--experts", "4", "--top-k", "5"], "model.moe.top_k = 5: must be in 1..4 (experts)"),
        (["--top-k", "0"], "model.moe.top_k = 0"),
        (["--noise", "-1"], "noise = -1.0: must be in 0..10"),
        (["--noise", "nan"], "noise = nan: must be in 0..10"),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path, capsys, words, message):
    dense = write_dense(tmp_path / "dense", "llama")
    assert main(["upcycle", dense, str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_other_models_are_refused(tmp_path, capsys):
    dense = write_dense(tmp_path / "dense", "qwen3")
    sparse = upcycle(dense, tmp_path / "sparse", experts=4, top_k=2)
    assert main(["upcycle", str(sparse), str(tmp_path / "out")]) != 0
    assert "the model has 4 experts already" in capsys.readouterr().err
    from transformers import Qwen2Config

    other = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))
    other.save_pretrained(tmp_path / "qwen2")
    assert main(["upcycle", str(tmp_path / "qwen2"), str(tmp_path / "out")]) != 0
    assert "the family qwen2 has no counterpart with experts" in capsys.readouterr().err
