"""config.json: both spellings, the defaults of the transformers classes, and every refusal
by name.
"""

import dataclasses
import json

import pytest

from compass_jax.config import ModelConfig, MoEConfig
from compass_jax.model.families.raw import UnsupportedModel, WeightsError
from compass_jax.weights.hf_config import (
    config_from_dict,
    find_token_ids,
    read_hf_config,
    write_hf_config,
)

HUB = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "bos_token_id": 151643,
    "decoder_sparse_step": 2,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [7, 1],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
WANTED = ModelConfig(
    family="qwen3_moe",
    vocab_size=151936,
    hidden=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    ffn=6144,
    max_positions=40960,
    moe=MoEConfig(
        experts=128, top_k=8, ffn=768, norm_top_k=True, sparse_step=2, dense_layers=(1, 7)
    ),
)
QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def without(raw, *names):
    return {name: value for name, value in raw.items() if name not in names}


def test_the_spelling_of_the_hub():
    assert config_from_dict(HUB) == WANTED


def test_the_spelling_of_transformers_5():
    newer = without(HUB, "num_experts", "rope_theta", "rope_scaling") | {
        "num_local_experts": 128,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    }
    assert config_from_dict(newer) == WANTED


def test_two_spellings_that_disagree_are_refused():
    with pytest.raises(WeightsError, match="num_experts = 128 and num_local_experts = 64 disagree"):
        config_from_dict(HUB | {"num_local_experts": 64})


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3", "qwen2"])
def test_absent_fields_take_the_defaults_of_the_transformers_class(family):
    """The reference is what transformers makes of the same short config.json, read back from the
    file that it saves.
    """
    from transformers import AutoConfig

    short = QWEN2 | {"model_type": family} | ({"num_experts": 16} if family == "qwen3_moe" else {})
    expected = AutoConfig.for_model(**short)
    actual = config_from_dict(short)
    assert actual == config_from_dict(expected.to_dict())
    assert actual.rope_theta == expected.rope_parameters["rope_theta"] == 10_000.0
    assert actual.head_dim == getattr(expected, "head_dim", 32 // 4)
    assert (
        actual.norm_eps == expected.rms_norm_eps
        and actual.max_positions == expected.max_position_embeddings
    )
    assert actual.tie_embeddings == expected.tie_word_embeddings
    if family == "qwen3_moe":
        moe = actual.moe
        assert (moe.top_k, moe.ffn, moe.norm_top_k) == (
            expected.num_experts_per_tok,
            expected.moe_intermediate_size,
            expected.norm_topk_prob,
        )


def test_biases_and_norms_of_the_families():
    qwen2, qwen3 = config_from_dict(QWEN2), config_from_dict(QWEN2 | {"model_type": "qwen3"})
    biased = config_from_dict(QWEN2 | {"model_type": "qwen3", "attention_bias": True})
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.o_bias) == (False, True, False)
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.o_bias) == (True, False, False)
    assert (biased.qk_norm, biased.qkv_bias, biased.o_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma"}, ["model_type", "gemma", "qwen2 | qwen2_moe | qwen3 | qwen3_moe"]),
        ({"model_type": None}, ["model_type", "None"]),
        ({"use_sliding_window": True}, ["use_sliding_window", "True"]),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            ["layer_types", "sliding_attention"],
        ),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["rope_scaling", "linear"]),
        ({"rope_scaling": 2.0}, ["rope_scaling = 2.0 is not supported"]),
        ({"rope_scaling": "type"}, ["rope_scaling = 'type' is not supported"]),
        ({"rope_parameters": ["type"]}, ["rope_parameters = ['type'] is not supported"]),
        ({"rope_parameters": True}, ["rope_parameters = True is not supported"]),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}},
            ["rope_parameters", "dynamic"],
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            ["rope_parameters", "0.25"],
        ),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}},
            ["rope_parameters", "mrope_section"],
        ),
        ({"use_mrope": True}, ["use_mrope", "True"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "fp8"]),
        ({"num_nextn_predict_layers": 1}, ["num_nextn_predict_layers", "1"]),
        ({"scoring_func": "sigmoid"}, ["scoring_func", "sigmoid", "softmax"]),
        ({"routed_scaling_factor": 2.5}, ["routed_scaling_factor = 2.5", "1.0"]),
        ({"n_group": 8}, ["n_group = 8", "1"]),
        ({"topk_group": 4}, ["topk_group = 4", "1"]),
        ({"shared_expert_intermediate_size": 512}, ["shared_expert_intermediate_size = 512", "0"]),
        ({"n_shared_experts": 1}, ["n_shared_experts = 1", "0"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping = 30.0", "null"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping = 50.0", "null"]),
        ({"logit_softcapping": 15.0}, ["logit_softcapping = 15.0", "null"]),
        ({"clip_qkv": 8.0}, ["clip_qkv = 8.0", "null"]),
        ({"qkv_bias": True}, ["qkv_bias = True", "False in this qwen3_moe"]),
        ({"use_qk_norm": False}, ["use_qk_norm = False", "True in this qwen3_moe"]),
        ({"mlp_bias": True}, ["mlp_bias = True", "false"]),
        ({"auto_map": {"AutoModel": "m.M"}}, ["auto_map", "no code"]),
        ({"architectures": ["Qwen3MoeForTokenClassification"]}, ["architectures", "ForCausalLM"]),
        ({"rope_interleaved": True}, ["rope_interleaved = True", "false"]),
        ({"rope_in_pairs": True}, ["rope_in_pairs = True", "qwen3_moe", "remove those"]),
        ({"a" * 10_000: "b" * 10_000}, ["aaa = 'bbb", "remove those"]),
        ({"model_type": "qwen3"}, ["decoder_sparse_step", "the keys of a qwen3 model"]),
        ({"model_type": "qwen2", "attention_bias": False}, ["attention_bias = False", "true"]),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(change, named):
    with pytest.raises(UnsupportedModel) as caught:
        raw = HUB if change.get("model_type") != "qwen2" else QWEN2
        config_from_dict(raw | change, "somewhere/config.json")
    assert len(str(caught.value)) < 1000
    for text in ["somewhere/config.json", *named, "supported"]:
        assert text in str(caught.value)


NEUTRAL = {
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "is_decoder": False,
    "auto_map": None,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "something_else": None,
    "unsloth_fixed": True,
    "qkv_bias": False,
    "use_qk_norm": True,
    "architectures": ["Qwen3MoeForCausalLM"],
    "layer_types": ["full_attention"] * 48,
    "eos_token_id": [1, 2],
}


@pytest.mark.parametrize("field", NEUTRAL)
def test_a_key_at_the_value_that_changes_nothing_is_read(field):
    assert config_from_dict(HUB | {field: NEUTRAL[field]}) == WANTED
    assert config_from_dict(HUB | NEUTRAL) == WANTED


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3", "qwen2"])
def test_whatever_transformers_saves_of_the_three_families_is_read(family, tmp_path):
    from transformers import AutoConfig, PretrainedConfig

    saved = AutoConfig.for_model(**QWEN2 | {"model_type": family})
    saved.save_pretrained(tmp_path)
    assert read_hf_config(tmp_path) == config_from_dict(saved.to_dict())
    base = {
        name: value for name, value in PretrainedConfig().to_dict().items() if name != "model_type"
    }
    config_from_dict(saved.to_dict() | base)


BAD_NUMBERS = [0, -1, float("nan"), float("inf"), float("-inf"), 10**400]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for field in ("rms_norm_eps", "rope_theta", "initializer_range")
        for value in BAD_NUMBERS
        if (field, value) != ("initializer_range", 0)  # weights of zeros are a model
    ],
)
def test_a_number_that_makes_no_model_is_refused(field, value):
    names = {
        "rms_norm_eps": "norm_eps",
        "rope_theta": "rope_theta",
        "initializer_range": "init_std",
    }
    with pytest.raises(WeightsError, match=rf"impossible model: model\.{names[field]} = "):
        config_from_dict(HUB | {field: value})


@pytest.mark.parametrize("value", [0, -1, 2**31, 10**18, 10**400])
@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "num_key_value_heads",
        "max_position_embeddings",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "decoder_sparse_step",
    ],
)
def test_a_size_that_cannot_be_is_refused_at_once(field, value):
    with pytest.raises(WeightsError, match="impossible model: model"):
        config_from_dict(HUB | {field: value})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (without(HUB, "hidden_size"), "has no hidden_size"),
        (without(HUB, "num_experts"), "has no num_experts"),
        (HUB | {"hidden_size": "2048"}, "hidden_size = '2048', expected int"),
        (HUB | {"tie_word_embeddings": 1}, "tie_word_embeddings = 1, expected bool"),
        (
            HUB | {"num_key_value_heads": 5},
            "impossible model.*not a multiple of model.kv_heads = 5",
        ),
        (HUB | {"num_experts_per_tok": 200}, "impossible model.*top_k = 200"),
        (HUB | {"mlp_only_layers": [48]}, "impossible model.*dense_layers"),
        (HUB | {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        (HUB | {"mlp_only_layers": ""}, "mlp_only_layers"),
        (
            HUB | {"layer_types": ["full_attention"]},
            "layer_types has 1 entries, num_hidden_layers is 48",
        ),
        (HUB | {"eos_token_id": 151936}, "eos_token_id = 151936, a token id from 0 to 151935"),
        (HUB | {"pad_token_id": -1}, "pad_token_id = -1"),
        (HUB | {"bos_token_id": [1]}, r"bos_token_id = \[1\]"),
        (
            HUB | {"rope_parameters": {"rope_theta": 5e5}},
            "rope_theta = 1000000.0 and rope_parameters .* disagree",
        ),
        (HUB | {"model_type": ["qwen3"]}, "model_type"),
    ],
)
def test_malformed_values_are_named(raw, message):
    with pytest.raises(WeightsError, match=message):
        config_from_dict(raw)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(WeightsError, match=r"config\.json does not exist"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(WeightsError, match=r"config\.json: not JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 1, "vocab_size": 2}')
    with pytest.raises(WeightsError, match="the key 'vocab_size' comes twice"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(WeightsError, match="holds a list"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    "raw",
    [
        HUB,
        QWEN2,
        QWEN2
        | {
            "model_type": "qwen3",
            "attention_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 10,
        },
    ],
)
def test_writing_then_reading_gives_the_same_model(raw):
    config = dataclasses.replace(
        config_from_dict(raw), rope_theta=777.0, norm_eps=3e-5, init_std=0.5
    )
    assert config_from_dict(json.loads(json.dumps(write_hf_config(config)))) == config


def test_a_model_that_its_class_cannot_express_is_not_exported():
    config = dataclasses.replace(config_from_dict(QWEN2), qk_norm=True)
    with pytest.raises(UnsupportedModel, match="qwen2 model has"):
        write_hf_config(config)


def test_token_ids_come_from_the_config_or_the_tokenizer(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<end>"}, "pad_token": "<pad>", "bos_token": None})
    )
    assert find_token_ids(tmp_path) == {}
    tokens = [{"id": 4, "content": "<end>"}, {"id": 9, "content": "<pad>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    assert find_token_ids(tmp_path) == {"eos_token_id": 4, "pad_token_id": 9}
    (tmp_path / "config.json").write_text(
        json.dumps({"eos_token_id": [7, 8], "bos_token_id": None})
    )
    assert find_token_ids(tmp_path) == {"eos_token_id": [7, 8, 4]}
