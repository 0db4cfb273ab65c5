"""Published config.json files: read as the model computes, or refused with every reason."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
from evolve import evolve

from compass_jax.config import ConfigError, MLAConfig, YarnRope
from compass_jax.model.families.base import KEYS, MOE_KEYS, Attention, Family
from compass_jax.model.families.find import built_in, find
from compass_jax.model.families.raw import UnsupportedModel, WeightsError
from compass_jax.model.flops import active_params
from compass_jax.model.params import param_count
from compass_jax.model.routers.sigmoid import Sigmoid
from compass_jax.weights.hf_config import config_from_dict, write_hf_config

PUBLISHED = {
    file.stem: json.loads(file.read_text())
    for file in (Path(__file__).parent / "published_configs").glob("*.json")
}
QWEN3_2507 = PUBLISHED["Qwen3-30B-A3B-Instruct-2507"]
EXAMPLE = Path(__file__).parents[3] / "examples" / "own_family"
CWM = f"{EXAMPLE / 'cwm.py'}:FAMILY"


def without(raw, *keys):
    return {key: value for key, value in raw.items() if key not in keys}


def careless(name, architecture, moe=True, **changes):
    """Returns a family whose author only renames keys."""
    moe_keys = MOE_KEYS if moe else None
    return Family(name, architecture, moe_keys=moe_keys, **changes)


BIASED = ("qwen2.5", "qwen1.5-moe", "qwen2-57b", "gpt-oss", "glm-4.5-air")
READ = {
    "qwen2.5": (PUBLISHED["Qwen2.5-0.5B-Instruct"], None),
    "qwen3": (PUBLISHED["Qwen3-0.6B"], None),
    "qwen3-2507": (QWEN3_2507, None),
    "smollm2": (PUBLISHED["SmolLM2-135M-Instruct"], None),
    "llama-3": (PUBLISHED["Meta-Llama-3-8B"], None),
    "llama-3.1": (PUBLISHED["Llama-3.1-8B-Instruct"], None),
    "llama-3.2": (PUBLISHED["Llama-3.2-1B-Instruct"], None),
    "mistral-v0.1": (PUBLISHED["Mistral-7B-v0.1"], None),
    "mistral-v0.3": (PUBLISHED["Mistral-7B-Instruct-v0.3"], None),
    "mixtral": (PUBLISHED["Mixtral-8x7B-v0.1"], None),
    "olmoe": (PUBLISHED["OLMoE-1B-7B-0924"], None),
    "qwen1.5-moe": (PUBLISHED["Qwen1.5-MoE-A2.7B"], None),
    "qwen2-57b": (PUBLISHED["Qwen2-57B-A14B"], None),
    "gpt-oss": (PUBLISHED["gpt-oss-20b"], None),
    "glm-4.5-air": (PUBLISHED["GLM-4.5-Air"], None),
    "deepseek-v3": (PUBLISHED["DeepSeek-V3"], None),
}


@pytest.mark.parametrize("name", READ)
def test_a_published_config_is_read_and_written_back(name):
    raw, family = READ[name]
    config = config_from_dict(raw, family=family)
    assert (config.hidden, config.layers) == (raw["hidden_size"], raw["num_hidden_layers"])
    assert (config.norm_eps, config.rope_theta) == (raw["rms_norm_eps"], raw["rope_theta"])
    assert config.tie_embeddings == raw["tie_word_embeddings"]
    assert config.qk_norm == name.startswith(("qwen3", "olmoe")) and config.qkv_bias == (
        name in BIASED
    )
    exported = json.loads(json.dumps(write_hf_config(config)))
    assert config_from_dict(exported, family=family) == config
    # Mistral's class has a window by default
    assert exported["sliding_window"] == {"mistral-v0.1": 4096, "gpt-oss": 128}.get(name)


def test_mixtral_divides_the_weights_of_the_chosen_experts():
    moe = config_from_dict(PUBLISHED["Mixtral-8x7B-v0.1"]).moe
    assert moe.norm_top_k and (moe.experts, moe.top_k, moe.ffn) == (8, 2, 14336)
    exported = write_hf_config(config_from_dict(PUBLISHED["Mixtral-8x7B-v0.1"]))
    assert not {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"} & exported.keys()


def test_glm_has_a_dense_layer_a_shared_expert_and_half_rotary_heads():
    config = config_from_dict(PUBLISHED["GLM-4.5-Air"])
    moe = config.mixture
    assert (moe.dense_layers, moe.shared_ffn, moe.experts) == ((0,), 1408, 128)
    assert (config.rotary_dim, config.head_dim, moe.router.name) == (64, 128, "sigmoid")
    assert len(config.moe_layers) == 45
    exported = write_hf_config(config)
    assert (exported["first_k_dense_replace"], exported["n_shared_experts"]) == (1, 1)
    assert (exported["num_nextn_predict_layers"], exported["partial_rotary_factor"]) == (0, 0.5)
    for change, message in (
        ({"moe": {"dense_layers": (1,)}}, "dense layers are the first ones"),
        ({"moe": {"shared_ffn": 1409}}, "it is a multiple of model.moe.ffn = 1408"),
    ):
        with pytest.raises(UnsupportedModel, match=message):
            write_hf_config(evolve(config, **change))


def test_deepseek_has_latent_attention_and_the_size_that_is_published():
    raw = PUBLISHED["DeepSeek-V3"]
    config = config_from_dict(raw)
    assert config.mla == MLAConfig(kv_rank=512, rope_dim=64, value_dim=128, q_rank=1536)
    assert (config.head_dim, config.rotary_dim, config.cache_width) == (192, 64, 128 * 320)
    assert config.mixture.router == Sigmoid(groups=8, top_groups=4, scale=2.5)
    assert (param_count(config) // 10**9, active_params(config) // 10**9) == (671, 37)
    for lacking in ("q_lora_rank", "kv_lora_rank", "v_head_dim", "scoring_func", "topk_method"):
        assert config_from_dict(without(raw, lacking)) == config
    direct = config_from_dict(raw | {"q_lora_rank": None})  # null differs from the class's default
    assert direct.mla == dataclasses.replace(config.mla, q_rank=0)
    exported = write_hf_config(direct)
    assert exported["q_lora_rank"] is None and exported["qk_nope_head_dim"] == 128
    assert exported["topk_method"] == "noaux_tc" and "head_dim" not in exported


@pytest.mark.parametrize("name", ["Llama-3.2-1B-Instruct", "OLMoE-1B-7B-0924"])
def test_a_class_that_has_as_many_heads_of_keys_as_of_queries_by_default(name):
    """Llama 1's config.json has no number of them, and its context under another name, too."""
    raw = PUBLISHED[name] | {"max_sequence_length": 2048}
    config = config_from_dict(without(raw, "num_key_value_heads"))
    assert config.kv_heads == config.heads == raw["num_attention_heads"]
    with pytest.raises(UnsupportedModel, match="it has no num_key_value_heads"):
        config_from_dict(without(PUBLISHED["Qwen3-0.6B"], "num_key_value_heads"))


def test_what_differs_from_deepseek_v3_is_refused_all_at_once():
    raw = dict(PUBLISHED["DeepSeek-V3"])
    raw |= {"attention_bias": True, "scoring_func": "softmax", "topk_method": "greedy"}
    raw |= {"moe_layer_freq": 2, "index_topk": 2048}
    with pytest.raises(UnsupportedModel) as caught:
        config_from_dict(raw)
    for name in ("attention_bias = True", "scoring_func = 'softmax'", "topk_method = 'greedy'"):
        assert name in str(caught.value)
    assert "moe_layer_freq = 2" in str(caught.value) and "index_topk = 2048" in str(caught.value)
    raw = PUBLISHED["DeepSeek-V3"] | {"num_key_value_heads": 8}
    with pytest.raises(WeightsError, match=r"model.kv_heads = 8: every head has its keys"):
        config_from_dict(raw)
    config = config_from_dict(raw | {"num_key_value_heads": 128})
    for change, message in (
        ({"mla": None}, "'deepseek_v3' needs model.mla"),
        ({"family": "glm4_moe"}, "'glm4_moe' takes no model.mla"),
    ):
        with pytest.raises(UnsupportedModel, match=message):
            write_hf_config(dataclasses.replace(config, **change))


PLAIN = Attention(qk_norm=False, qkv_bias=False, o_bias=False)
WINDOWLESS = careless("mistral", "MistralForCausalLM", moe=False, attention=(PLAIN,))
NAMES = {  # the config, a careless family, the keys that the error must name
    "mixtral": (
        PUBLISHED["Mixtral-8x7B-v0.1"],
        careless(
            "mixtral",
            "MixtralForCausalLM",
            moe=False,
            attention=(Attention(False, False, False),),
        ),
        ["num_local_experts", "num_experts_per_tok"],
    ),
    "mistral-v0.1": (
        PUBLISHED["Mistral-7B-v0.1"],
        careless("mistral", "MistralForCausalLM", moe=False),
        ["sliding_window = 4096", "attention_bias"],
    ),
    "llama-3.1": (
        PUBLISHED["Llama-3.1-8B-Instruct"],
        careless("llama", "LlamaForCausalLM", moe=False),
        ["rope_scaling", "llama3"],
    ),
    "llama-3.2": (
        PUBLISHED["Llama-3.2-1B-Instruct"],
        careless("llama", "LlamaForCausalLM", moe=False),
        ["rope_scaling"],
    ),
    "qwen1.5-moe": (
        PUBLISHED["Qwen1.5-MoE-A2.7B"],
        careless("qwen2_moe", "Qwen2MoeForCausalLM"),
        ["shared_expert_intermediate_size = 5632", "attention_bias"],
    ),
    "qwen2-57b": (
        PUBLISHED["Qwen2-57B-A14B"],
        careless("qwen2_moe", "Qwen2MoeForCausalLM"),
        ["shared_expert_intermediate_size = 20480", "attention_bias"],
    ),
    "olmoe": (
        PUBLISHED["OLMoE-1B-7B-0924"],
        careless("olmoe", "OlmoeForCausalLM"),
        ["moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"],
    ),
    "deepseek-v2": (
        PUBLISHED["DeepSeek-V2-Lite"],
        careless("deepseek_v2", "DeepseekV2ForCausalLM"),
        [
            "auto_map",
            "first_k_dense_replace = 1",
            "kv_lora_rank = 512",
            "n_shared_experts = 2",
            "rope_scaling",
            "qk_nope_head_dim",
            "decoder_sparse_step",
            "n_routed_experts",
        ],
    ),
    "glm-4.5-air": (
        PUBLISHED["GLM-4.5-Air"],
        careless("glm4_moe", "Glm4MoeForCausalLM"),
        [
            "partial_rotary_factor = 0.5",
            "n_shared_experts = 1",
            "num_nextn_predict_layers = 1",
            "first_k_dense_replace = 1",
            "use_qk_norm = False",
            "n_routed_experts",
        ],
    ),
    "gpt-oss": (
        PUBLISHED["gpt-oss-20b"],
        careless("gpt_oss", "GptOssForCausalLM"),
        [
            "rope_scaling",
            "sliding_window = 128",
            "swiglu_limit = 7.0",
            "layer_types",
            "norm_topk_prob",
            "experts_per_token",
        ],
    ),
    "gemma-3": (
        PUBLISHED["gemma-3-1b-it"],
        careless("gemma3_text", "Gemma3ForCausalLM", moe=False),
        [
            "hidden_activation = 'gelu_pytorch_tanh'",
            "query_pre_attn_scalar",
            "sliding_window = 512",
            "rope_local_base_freq",
            "sliding_window_pattern",
            "tie_word_embeddings",
            "hidden_act",
        ],
    ),
    "phi-3": (
        PUBLISHED["Phi-3-mini-4k-instruct"],
        careless("phi3", "Phi3ForCausalLM", moe=False),
        ["auto_map", "sliding_window = 2047"],
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_family_file_overlooks_is_refused_all_at_once(name, tmp_path, monkeypatch):
    raw, family, named = NAMES[name]
    with pytest.raises(UnsupportedModel) as caught:
        family.read(raw, "config.json", name)
    for text in named:
        assert text in str(caught.value), str(caught.value)
    for harmless in ("token_id", "_name_or_path", "version", "pdrop", "dtype", "original_max"):
        assert harmless not in re.sub(r"\{.*?\}", "", str(caught.value))
    if raw["model_type"] not in built_in():
        with pytest.raises(
            UnsupportedModel, match=r"model_type = .*\n +read as \w+, the"
        ) as caught:
            config_from_dict(raw)
        assert "path/file.py" not in str(caught.value), "no family file computes these models"


@pytest.mark.parametrize(
    "lacking",
    [
        "norm_topk_prob",
        "num_experts_per_tok",
        "tie_word_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "hidden_act",
        "attention_bias",
        "moe_intermediate_size",
        "mlp_only_layers",
    ],
)
def test_a_value_without_default_is_an_error(lacking):
    """The package's family reads QWEN3_2507 without the key, and a family without defaults refuses
    it.
    """
    raw = without(QWEN3_2507, lacking)
    assert config_from_dict(raw).family == "qwen3_moe"
    foreign = careless("qwen3_moe", "Qwen3MoeForCausalLM")
    assert foreign.read(QWEN3_2507, "x", "qwen3_moe").moe.norm_top_k
    with pytest.raises(
        UnsupportedModel, match=rf"has no {lacking}, and the family qwen3_moe has no default"
    ):
        foreign.read(raw, "x", "x")
    value = QWEN3_2507[lacking]
    for way in ("defaults", "fixed"):
        saying = dataclasses.replace(foreign, **{way: {lacking: value}})
        assert saying.read(raw, "x", "qwen3_moe") == config_from_dict(QWEN3_2507)


def test_a_fixed_value_that_config_json_contradicts_is_refused():
    family = careless("qwen3_moe", "Qwen3MoeForCausalLM", fixed={"norm_topk_prob": False})
    with pytest.raises(UnsupportedModel, match=r"norm_topk_prob = True .*supported: False, always"):
        family.read(QWEN3_2507, "x", "x")
    raw = QWEN3_2507 | {"norm_topk_prob": False}
    config = family.read(raw, "x", "qwen3_moe")
    assert not config.moe.norm_top_k and "norm_topk_prob" not in family.write(config, "bf16", {})
    other = evolve(config, moe={"norm_top_k": True})
    with pytest.raises(UnsupportedModel, match="norm_topk_prob is True: a qwen3_moe model always"):
        family.check(other)


@pytest.mark.parametrize(
    ("window", "flag", "read"),
    [
        *itertools.product([4096, 131072, 0], [False], [True]),
        *itertools.product([4096, 131072, 1], [None, "absent"], [False]),
        *[(None, None, True), (None, "absent", True), (4096, True, False)],
    ],
)
def test_a_sliding_window_is_harmless_only_where_use_sliding_window_says_so(window, flag, read):
    """The class of this family has no window."""
    raw = PUBLISHED["Mistral-7B-v0.1"] | {"sliding_window": window}
    raw |= {} if flag == "absent" else {"use_sliding_window": flag}
    if read:
        assert WINDOWLESS.read(raw, "config.json", "mistral").layers == 32
        return
    with pytest.raises(UnsupportedModel, match="sliding_window = "):
        WINDOWLESS.read(raw, "config.json", "mistral")


LAYERS = ["sliding_attention"] * 32
WINDOWS = [  # changes of Mistral's config.json, and the window that is read or the error
    ({}, 4096),
    ({"sliding_window": None}, 0),
    ({"sliding_window": None, "use_sliding_window": True}, 0),
    ({"sliding_window": 100, "use_sliding_window": True}, 100),
    ({"sliding_window": 100, "layer_types": LAYERS}, 100),
    ({"use_sliding_window": False}, "use_sliding_window = False .*window of 4096 acts"),
    ({"layer_types": ["full_attention"] * 32}, "layer_types = .*'sliding_attention' in every"),
    ({"sliding_window": None, "layer_types": LAYERS}, "layer_types = .*'full_attention' in ev"),
    ({"layer_types": LAYERS[1:]}, "layer_types has 31 entries, num_hidden_layers is 32"),
    ({"sliding_window": 0}, "sliding_window = 0: must be positive"),
    ({"sliding_window": "4096"}, "sliding_window = '4096', expected int"),
]


@pytest.mark.parametrize(("change", "read"), WINDOWS)
def test_a_sliding_window_acts_in_mistral(change, read):
    raw = PUBLISHED["Mistral-7B-v0.1"] | change
    if isinstance(read, str):
        with pytest.raises(WeightsError, match=read):
            config_from_dict(raw)
        return
    config = config_from_dict(raw)
    assert config.sliding_window == read == config.window_of(31)
    if "sliding_window" not in change:
        del raw["sliding_window"]
        assert config_from_dict(raw) == config  # the class's default


def test_layers_with_and_without_a_window_are_read_by_a_family_that_has_them():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    raw = PUBLISHED["Mistral-7B-v0.1"] | {"num_hidden_layers": 4, "layer_types": kinds}
    raw |= {"model_type": "cwm", "architectures": None, "attention_bias": None}
    config = config_from_dict(raw, family=CWM)
    assert [config.window_of(i) for i in range(4)] == [4096, 0, 4096, 0]
    exported = write_hf_config(config)
    assert exported["layer_types"] == kinds
    assert config_from_dict(exported, family=CWM) == config
    with pytest.raises(WeightsError, match="has no layer_types"):
        config_from_dict(without(raw, "layer_types"), family=CWM)
    for family, message in (("mistral", "same window in every layer"), ("llama", "no window")):
        with pytest.raises(UnsupportedModel, match=message):
            find(family).check(dataclasses.replace(config, family=family))


@pytest.mark.parametrize(
    "key",
    [
        "unk_token_id",
        "image_token_id",
        "vision_start_token_id",
        "boi_token_index",
        "mask_token_id",
        "_name_or_path",
        "_model_name_or_path",
        "base_model_name_or_path",
        "_commit_hash",
        "transformers_version",
        "mergekit_version",
        "unsloth_version",
        "unsloth_fixed",
        "_attn_implementation_internal",
        "_experts_implementation",
        "suppress_token_ids",
    ],
)
def test_ids_of_tokens_and_metadata_pass(key):
    assert config_from_dict(PUBLISHED["Qwen3-0.6B"] | {key: "anything"}).layers == 28


@pytest.mark.parametrize("key", ["token_mixer", "attn_scale", "sliding_window_pattern", "_norm"])
def test_what_only_resembles_them_does_not(key):
    with pytest.raises(UnsupportedModel, match=f"{key} = 2 is not supported"):
        config_from_dict(PUBLISHED["Qwen3-0.6B"] | {key: 2})


def test_a_family_file_with_a_key_that_is_read_nowhere_or_none_for_a_field_is_refused(tmp_path):
    for changes, message in (
        ({"fixed": {"norm_top_k": True}}, "fixed has norm_top_k, which is read from no config"),
        ({"defaults": {"eps": 1e-5}}, "defaults has eps, which is read from no config.json"),
        ({"keys": without(KEYS, "ffn")}, "keys must have a key of config.json for .*look at ffn"),
        ({"moe_keys": MOE_KEYS | {"gate": "g"}}, "moe_keys must have .*look at gate"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(careless("a", "A"), **changes)


def test_the_examples_family_file_is_named_by_its_model_type():
    assert find(CWM).model_type == "cwm"


def test_gpt_oss_has_the_defaults_and_layers_of_its_class():
    """Scaled rotary embeddings are a default as well: a missing or null key does not turn them off
    in this class.
    """
    raw = PUBLISHED["gpt-oss-20b"]
    config = config_from_dict(raw)
    assert [config.window_of(i) for i in range(4)] == [128, 0, 128, 0] and config.attention_sinks
    assert config.rope_scaling == YarnRope(32.0, 4096, truncate=False)
    assert config.mixture.swiglu_limit == 7.0 and config.mixture.norm_top_k
    for lacking in ("rope_scaling", "swiglu_limit", "sliding_window", "head_dim", "rope_theta"):
        assert config_from_dict(without(raw, lacking)) == config
    assert config_from_dict(raw | {"rope_scaling": None}) == config
    plain = dataclasses.replace(config, rope_scaling=None)
    assert config_from_dict(write_hf_config(plain)) == plain
    for change, message in (
        ({"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5 .*1.702"),
        ({"layer_types": ["chunked_attention"] * 24}, "layer_types = .*chunked"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = .*awq"),
    ):
        with pytest.raises(UnsupportedModel, match=message):
            config_from_dict(raw | change)
