"""Each family against transformers, on two unusual configurations: logits, greedy tokens through
the engine, weights bit for bit, and router replay.
"""

import copy
import dataclasses
import functools
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import assert_same_bits, tensors_of
from hf_models import in_dtype, random_model, reference_greedy, reference_logits
from safetensors.numpy import save_file

from compass_jax.apps.curate.merge import Linear
from compass_jax.apps.curate.merge_folders import merge_folders
from compass_jax.base.records import Prompt
from compass_jax.config import ComputeConfig, RolloutConfig
from compass_jax.model.families.raw import UnsupportedModel, WeightsError
from compass_jax.model.logprobs import head_weights, logits_of
from compass_jax.model.params import to_decode
from compass_jax.model.transformer import Transformer, apply
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.weights.convert import export_hf, import_hf
from compass_jax.weights.hf import load_params
from compass_jax.weights.hf_config import config_from_dict, read_hf_config, write_hf_config

COMMON = dict(
    vocab_size=157,
    hidden_size=40,
    intermediate_size=56,
    max_position_embeddings=128,
    num_hidden_layers=3,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
CASES = {
    "llama, llama3": dict(
        COMMON,
        model_type="llama",
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=10,
        rms_norm_eps=1e-4,
        rope_parameters=LLAMA3 | {"rope_theta": 700.0},
        tie_word_embeddings=True,
    ),
    "llama, yarn": dict(
        COMMON,
        model_type="llama",
        hidden_size=42,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=12,
        rms_norm_eps=1e-5,
        attention_bias=True,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=3000.0,
            factor=4.0,
            original_max_position_embeddings=32,
        ),
        tie_word_embeddings=False,
    ),
    "mistral, window": dict(
        COMMON,
        model_type="mistral",
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=14,
        rms_norm_eps=1e-3,
        rope_theta=300.0,
        sliding_window=13,
        tie_word_embeddings=False,
    ),
    "mistral, tied": dict(
        COMMON,
        model_type="mistral",
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=6,
        sliding_window=None,
        rope_parameters=dict(rope_type="linear", rope_theta=5000.0, factor=2.5),
        tie_word_embeddings=True,
    ),
    "mixtral": dict(
        COMMON,
        model_type="mixtral",
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        num_local_experts=5,
        num_experts_per_tok=3,
        sliding_window=21,
        rms_norm_eps=1e-4,
        rope_theta=900.0,
    ),
    "mixtral, tied": dict(
        COMMON,
        model_type="mixtral",
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=18,
        num_local_experts=7,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    ),
    "qwen2_moe": dict(
        COMMON,
        model_type="qwen2_moe",
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
        decoder_sparse_step=2,
        rms_norm_eps=1e-4,
        rope_theta=900.0,
        tie_word_embeddings=False,
    ),
    "qwen2_moe, tied": dict(
        COMMON,
        model_type="qwen2_moe",
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=36,
        shared_expert_intermediate_size=12,
        mlp_only_layers=[0],
        norm_topk_prob=True,
        qkv_bias=False,
        tie_word_embeddings=True,
    ),
    # its class takes no head size other than hidden / heads
    "olmoe": dict(
        COMMON,
        model_type="olmoe",
        hidden_size=60,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_experts=7,
        num_experts_per_tok=3,
        intermediate_size=20,
        rms_norm_eps=1e-3,
        rope_theta=900.0,
        tie_word_embeddings=False,
    ),
    "olmoe, tied": dict(
        COMMON,
        model_type="olmoe",
        hidden_size=40,
        num_attention_heads=5,
        num_key_value_heads=1,
        num_experts=5,
        num_experts_per_tok=2,
        intermediate_size=36,
        norm_topk_prob=True,
        attention_bias=True,
        rope_parameters=LLAMA3 | {"rope_theta": 700.0},
        tie_word_embeddings=True,
    ),
    "gpt_oss": dict(
        COMMON,
        model_type="gpt_oss",
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=14,
        num_local_experts=7,
        num_experts_per_tok=3,
        intermediate_size=20,
        rms_norm_eps=1e-3,
        sliding_window=13,
        swiglu_limit=1.5,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=900.0,
            factor=8.0,
            truncate=False,
            original_max_position_embeddings=16,
        ),
        tie_word_embeddings=False,
    ),
    "gpt_oss, tied": dict(
        COMMON,
        model_type="gpt_oss",
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=5,
        num_experts_per_tok=2,
        intermediate_size=36,
        attention_bias=False,
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=700.0),
        tie_word_embeddings=True,
    ),
    "glm4_moe": dict(
        COMMON,
        model_type="glm4_moe",
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        n_shared_experts=2,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.7,
        rms_norm_eps=1e-4,
        rope_theta=900.0,
        use_qk_norm=True,
        tie_word_embeddings=False,
    ),
    "glm4_moe, tied": dict(
        COMMON,
        model_type="glm4_moe",
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=16,
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=36,
        first_k_dense_replace=2,
        norm_topk_prob=False,
        attention_bias=True,
        rope_parameters=dict(rope_type="default", rope_theta=700.0, partial_rotary_factor=0.25),
        tie_word_embeddings=True,
    ),
    "deepseek_v3": dict(
        COMMON,
        model_type="deepseek_v3",
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=22,
        kv_lora_rank=26,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=14,
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        n_shared_experts=2,
        first_k_dense_replace=1,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.7,
        rms_norm_eps=1e-4,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=900.0,
            factor=8.0,
            original_max_position_embeddings=16,
            beta_fast=8.0,
            beta_slow=1.0,
            mscale=0.7,
            mscale_all_dim=1.3,
        ),
        tie_word_embeddings=False,
    ),
    "deepseek_v3, tied": dict(
        COMMON,
        model_type="deepseek_v3",
        num_hidden_layers=5,
        num_attention_heads=5,
        num_key_value_heads=5,
        q_lora_rank=None,
        kv_lora_rank=18,
        qk_nope_head_dim=6,
        qk_rope_head_dim=8,
        v_head_dim=20,
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=36,
        n_shared_experts=1,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
        rope_theta=700.0,
        tie_word_embeddings=True,
    ),
}
PLAIN = ComputeConfig()
PROMPT, NEW = np.array([3, 141, 59, 26, 53, 58, 97, 9, 79, 32, 38], np.int32), 64


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """Returns (the transformers model, its folder, the config, the parameters)."""
    model = random_model(CASES[request.param])
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    config = read_hf_config(folder)
    return model, folder, config, load_params(folder, config, "float32")


def run(config, params, tokens, compute=PLAIN, **options):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    mask = jnp.ones(tokens.shape, bool)
    return apply(Transformer(config, compute), params, tokens, positions, mask=mask, **options)


def test_logits_equal_those_of_transformers(case):
    model, _, config, params = case
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 101)).astype(np.int32)
    reference = reference_logits(model, tokens)
    out = jax.jit(functools.partial(run, config))(params, jnp.asarray(tokens))
    logits = logits_of(out.hidden, head_weights(params))
    assert reference.std() >= 1
    np.testing.assert_allclose(logits, reference, atol=2e-4, rtol=0)


@pytest.mark.parametrize("case", ["mistral, window", "mixtral", "gpt_oss"], indirect=True)
def test_a_window_acts(case):
    """The window changes the logits of later tokens, but not of those within the first window."""
    _, _, config, params = case
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, 40)).astype(np.int32)
    wide = dataclasses.replace(config, sliding_window=1000)
    hidden, unlimited = (run(one, params, jnp.asarray(tokens)).hidden for one in (config, wide))
    change, window = np.abs(np.asarray(hidden - unlimited)).max(axis=(0, 2)), config.sliding_window
    assert change[:window].max() < 1e-4 and change[window:].min() > 1e-2


def test_what_is_not_computed_is_refused_all_at_once(case):
    raw = write_hf_config(case[2]) | {
        "attn_logit_softcapping": 50.0,
        "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "longrope"},
        "an_unknown_key": 1,
        "quantization_config": {"quant_method": "fp8"},
    }
    with pytest.raises(UnsupportedModel) as caught:
        config_from_dict(raw)
    for name in ("attn_logit_softcapping = 50.0", "'gelu'", "longrope", "an_unknown_key", "fp8"):
        assert name in str(caught.value)


@pytest.fixture(scope="module")
def greedy_reference(case):
    return reference_greedy(case[0], PROMPT, NEW)


ROWS = RolloutConfig(
    slots=2, prompt_buckets=(16,), max_new_tokens=NEW, tokens_per_call=16, cache_bucket=16
)
ENGINES = {
    "rows": (ROWS, PLAIN),
    "pages, scanned": (
        dataclasses.replace(ROWS, cache_pages=22, page_tokens=8, prefill_chunk=6),
        ComputeConfig(scan_decode=True),
    ),
}


# Each configuration runs one engine in the quick tests, in turn.
PAIRS = [
    pair if (i // 2 + i) % 2 == 0 else pytest.param(*pair, marks=pytest.mark.slow)
    for i, pair in enumerate(itertools.product(CASES, ENGINES))
]


@pytest.mark.parametrize(("case", "engine"), PAIRS, indirect=["case"])
def test_greedy_tokens_through_the_engine_equal_those_of_transformers(
    case, greedy_reference, engine
):
    _, _, config, params = case
    rollout, compute = ENGINES[engine]
    layout = "decode_stacked" if compute.scan_decode else "decode"
    job = Collection(
        Engine(config, compute, rollout, ()),
        to_decode(params, layout=layout),
        [Prompt(0, 0, "", "", PROMPT, "")],
        1,
        Purpose.EVAL,
        0,
        sampler=Sampler(temperature=0.0),
    )
    (sample,) = job
    assert len(set(greedy_reference)) >= 8
    assert sample.response.tolist() == greedy_reference


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_go_in_and_out_bit_for_bit(case, tmp_path, dtype):
    model, _, config, _ = case
    folder = tmp_path / "hf"
    in_dtype(model, dtype).save_pretrained(folder)
    import_hf(folder, tmp_path / "run")
    out = export_hf(tmp_path / "run", tmp_path / "out")
    tensors, exported = tensors_of(folder), tensors_of(out)
    assert exported.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_bits(exported[name], tensor)
    assert read_hf_config(out) == config


def test_the_config_is_read_back_as_it_is_written(case):
    from transformers import AutoConfig

    config = case[2]
    raw = write_hf_config(config)
    raw |= {key: 0 for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    reference = AutoConfig.for_model(**raw)
    (folder := case[1] / "again").mkdir(exist_ok=True)
    reference.save_pretrained(folder)
    assert read_hf_config(folder) == config


EXPERTS = [name for name in CASES if name.split(",")[0] not in ("llama", "mistral")]
of_experts = pytest.mark.parametrize("case", EXPERTS, indirect=True)


@of_experts
def test_experts_of_a_layer_in_one_tensor_are_read_too(case, tmp_path):
    """transformers 5 saves this layout, and gpt-oss has no other."""
    model, _, config, params = case
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in tensors_of(tmp_path))
    assert read_hf_config(tmp_path) == config
    jax.tree.map(assert_same_bits, load_params(tmp_path, config, "float32"), params)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))

    def split(x):
        """Returns a sharding of the last even axis over two devices."""
        axis = max((i for i in range(x.ndim) if x.shape[i] % 2 == 0), default=None)
        spec = jax.sharding.PartitionSpec(*("x" if i == axis else None for i in range(x.ndim)))
        return jax.sharding.NamedSharding(mesh, spec)

    parts = load_params(tmp_path, config, "float32", jax.tree.map(split, params))
    jax.tree.map(assert_same_bits, parts, params)


@pytest.mark.parametrize(
    "case",
    [name if "," not in name else pytest.param(name, marks=pytest.mark.slow) for name in EXPERTS],
    indirect=True,
)
def test_given_routes_are_replayed_with_gradients_through_the_live_gates(case, x64):
    """Most of the random routes are outside the live choice. The derivative of the hidden states
    along random changes, of the router and of all parameters, equals central differences.
    """
    _, _, config, params = case
    rng, moe, tokens = np.random.default_rng(0), config.mixture, jnp.arange(18).reshape(2, 9)
    shape = *tokens.shape, len(config.moe_layers), moe.experts
    routes = jnp.asarray(rng.random(shape).argsort(-1)[..., : moe.top_k].astype(np.uint8))
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
    tokens = jnp.asarray(tokens, jnp.int32)

    @jax.jit
    def loss(params):
        out = run(config, params, tokens, compute, routes=routes)
        return jnp.sum(jnp.sin(out.hidden)), out

    compute = ComputeConfig("float64", "float64")
    grads, out = jax.jit(jax.grad(loss, has_aux=True))(wide)
    np.testing.assert_array_equal(out.routes, routes)
    assert float(out.aux.flips.sum()) > 0.5 * float(out.aux.tokens.sum())
    for name in ("router", ""):
        step = jax.tree_util.tree_map_with_path(
            lambda path, x, name=name: jnp.asarray(
                1e-6 * rng.standard_normal(x.shape) * (name in str(path))
            ),
            wide,
        )
        high, low = (
            loss(jax.tree.map(lambda x, d, sign=sign: x + sign * d, wide, step))[0]
            for sign in (1, -1)
        )
        slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: jnp.sum(g * d), grads, step)))
        assert abs(float(slope)) > 1e-6
        np.testing.assert_allclose(float(high - low) / 2, float(slope), rtol=1e-5)


@pytest.mark.parametrize("case", ["deepseek_v3, tied"], indirect=True)
def test_a_selection_bias_in_bfloat16_is_exported_in_float32_with_its_values(case, tmp_path):
    import torch

    folder = tmp_path / "hf"
    copy.deepcopy(case[0]).to(torch.bfloat16).save_pretrained(folder)
    import_hf(folder, tmp_path / "run")
    exported = tensors_of(export_hf(tmp_path / "run", tmp_path / "out"))
    for name, tensor in tensors_of(folder).items():
        kind = np.float32 if name.endswith("e_score_correction_bias") else tensor.dtype
        assert_same_bits(exported[name], tensor.astype(kind))


@pytest.mark.parametrize("case", ["glm4_moe", "deepseek_v3"], indirect=True)
def test_layers_that_predict_further_tokens_are_ignored_and_shift_no_layer(case, tmp_path):
    """Fault 2 of router replay in other systems: the folder has one layer more than the decoder."""
    _, folder, config, params = case
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = tensors_of(folder)
    last = f"model.layers.{config.layers - 1}."
    extra = {
        name.replace(last, f"model.layers.{config.layers}."): tensor + 1
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    extra[f"model.layers.{config.layers}.eh_proj.weight"] = np.zeros((40, 80), np.float32)
    raw = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors | extra, tmp_path / "model.safetensors", {"format": "pt"})
    assert read_hf_config(tmp_path) == config
    jax.tree.map(assert_same_bits, load_params(tmp_path, config, "float32"), params)
    notices = []
    import_hf(tmp_path, tmp_path / "with", tell=notices.append)
    import_hf(folder, tmp_path / "without", tell=notices.append)
    assert len(notices) == 1 and notices[0].startswith(f"layer {config.layers} ignored")
    del extra[f"model.layers.{config.layers}.eh_proj.weight"]  # now surplus tensors
    save_file(tensors | extra, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=rf"holds tensors model.layers.{config.layers}"):
        load_params(tmp_path, config, "float32")


def test_models_whose_experts_are_one_tensor_are_merged(tmp_path):
    """gpt-oss has no other layout. Each tensor is merged separately."""
    folders = [tmp_path / str(seed) for seed in (1, 2)]
    for seed, folder in enumerate(folders):
        random_model(CASES["gpt_oss"], seed).save_pretrained(folder)
    merge_folders(folders[0], folders, tmp_path / "merged", Linear((0.25, 0.75)))
    first, second, merged = map(tensors_of, (*folders, tmp_path / "merged"))
    assert first.keys() == merged.keys()
    for name, tensor in merged.items():
        expected = 0.25 * first[name] + 0.75 * second[name]
        np.testing.assert_allclose(tensor, expected, atol=1e-6, err_msg=name)
