"""Configurations of a model type that no family has: every reason at once, the type first, and a
family file only where it could help.
"""

import json
from pathlib import Path

import pytest

from compass_jax.model.families.raw import UnsupportedModel, WeightsError
from compass_jax.weights.hf_config import read_hf_config

CONFIGS = Path(__file__).parent / "published_configs"
FILE = "path/file.py:FAMILY"
# as nvidia/Nemotron-H-8B-Base-8K's config.json, shortened
NEMOTRON = """{
  "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
  "attention_bias": false, "attention_head_dim": 128, "chunk_size": 128, "conv_kernel": 4,
  "hidden_size": 4096, "hybrid_override_pattern": "M-M-M-M*-", "intermediate_size": 21504,
  "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 128,
  "max_position_embeddings": 8192, "mlp_hidden_act": "relu2", "n_groups": 8,
  "num_attention_heads": 32, "num_hidden_layers": 52, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05, "ssm_state_size": 128, "tie_word_embeddings": false,
  "time_step_limit": [0.0, Infinity], "vocab_size": 131072}"""


def published(name, **changes):
    return {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}


def refusal(tmp_path, text):
    (tmp_path / "config.json").write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(UnsupportedModel) as caught:
        read_hf_config(tmp_path)
    return str(caught.value)


def test_the_type_comes_before_what_is_no_json(tmp_path):
    first, kind, *reasons = refusal(tmp_path, NEMOTRON).split("\n")
    assert first == f"{tmp_path / 'config.json'} is not supported:"
    assert "model_type = 'nemotron_h' is not supported" in kind and FILE not in kind
    assert "Infinity is no number of JSON" in reasons[0]
    text = "\n".join(reasons)
    for key in ("mamba_head_dim", "ssm_state_size", "hybrid_override_pattern", "mlp_hidden_act"):
        assert key in text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("NaN", "NaN is no number"),
        ("1e999", "1e999 is not finite"),
        ("1" * 60, "has more than 40 digits"),
        ('1, "hidden_size": 2, "hidden_size": 2', "comes twice"),
    ],
)
def test_the_type_comes_first_with_other_values_that_are_refused(tmp_path, value, words):
    text = refusal(tmp_path, f'{{"model_type": "mamba2", "x": {value}}}')
    assert text.index("model_type = 'mamba2'") < text.index(words)


@pytest.mark.parametrize(
    "text", ['{"model_type": "llama", "x": Infinity}', "{", "[1]", "[" * 10**5]
)
def test_a_known_type_and_a_damaged_file_keep_their_message(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError) as caught:
        read_hf_config(tmp_path)
    assert not isinstance(caught.value, UnsupportedModel)
    assert "model_type" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "reasons"),
    [
        (published("gemma-3-1b-it"), ["'gelu_pytorch_tanh'", "query_pre_attn_scalar = 256"]),
        (published("DeepSeek-V2-Lite"), ["read as deepseek_v3", "topk_method = 'greedy'"]),
        (
            published("Qwen3-0.6B", model_type="x", linear_num_key_heads=16),
            ["linear_num_key_heads"],
        ),
        (
            published("Llama-3.2-1B-Instruct", model_type="x", hidden_act="relu"),
            ["hidden_act = 'relu"],
        ),
        (
            published(
                "Qwen3-30B-A3B-Instruct-2507",
                model_type="x",
                logit_scale=0.5,
                vision_config={"a": 1},
            ),
            ["logit_scale = 0.5", "vision_config"],
        ),
        (
            published(
                "Mixtral-8x7B-v0.1", model_type="x", quantization_config={"quant_method": "awq"}
            ),
            ["awq"],
        ),
    ],
)
def test_all_reasons_are_named_and_no_family_file_that_cannot_help(tmp_path, raw, reasons):
    text = refusal(tmp_path, raw)
    assert f"model_type = {raw['model_type']!r} is not supported" in text and FILE not in text
    for reason in reasons:
        assert reason in text


@pytest.mark.parametrize(
    "raw",
    [
        published("DeepSeek-V3", model_type="kimi_k2"),
        published("Llama-3.2-1B-Instruct", model_type="aquila"),
        published("Qwen3-0.6B", model_type="x", n_layers=28, d_model=1024),
        {"model_type": "x", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100},
        {"model_type": "x", "d_model": 64, "moe_num_experts": 8, "moe_top_k": 2},
        {"model_type": "x", "num_selected_experts": 2, "n_experts": 8, "expert_ffn_hidden_size": 9},
        published("Mixtral-8x7B-v0.1", model_type="x", moe_k=2, moe_intermediate_size=64),
    ],
)
def test_a_family_file_is_proposed_where_names_alone_differ(tmp_path, raw):
    assert FILE in refusal(tmp_path, raw).split("\n  read as")[0]
