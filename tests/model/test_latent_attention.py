"""Multi-head latent attention beyond the comparison with transformers (tests/model/families):
meshes, the TPU's kernel, adapters, 8-bit rollouts, and settings that do not fit it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import COMPUTE, EOS, MODEL, ROLLOUT, make_prompt, random_params

from compass_jax.config import ConfigError, MeshConfig, MLAConfig, MoEConfig, YarnRope
from compass_jax.config.lora import LoRAConfig
from compass_jax.devices.sharding import Placement, make_mesh
from compass_jax.model import kernels
from compass_jax.model.flops import forward_flops
from compass_jax.model.lora import combine, init_adapters, is_low_rank, merged
from compass_jax.model.params import is_spec, param_specs, place, to_decode
from compass_jax.model.rope import deinterleaved, score_factor
from compass_jax.model.routers.sigmoid import Sigmoid
from compass_jax.model.transformer import Transformer, init_cache
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose
from compass_jax.training.step import forward
from compass_jax.weights.peft import peft_tensors
from compass_jax.weights.sync import sync_weights

LATENT = dataclasses.replace(
    MODEL,
    family="deepseek_v3",
    kv_heads=4,
    head_dim=12,
    qk_norm=False,
    mla=MLAConfig(kv_rank=12, rope_dim=4, value_dim=10, q_rank=8),
    rope_scaling=YarnRope(4.0, 16, mscale=1.0, mscale_all_dim=0.8),
    moe=MoEConfig(
        experts=6, top_k=2, ffn=16, dense_layers=(0,), router=Sigmoid(2, 1, 1.5), shared_ffn=16
    ),
)
DIRECT = dataclasses.replace(LATENT, mla=dataclasses.replace(LATENT.mla, q_rank=0))
PARAMS = random_params(LATENT)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(2, 40, (4, 16)), jnp.int32)
LENGTHS = jnp.array([16, 7, 10, 13], jnp.int32)


def log_probs(model, params, tokens=TOKENS, lengths=LENGTHS):
    """Returns log-probs, and the gradient of a function of them."""

    def loss(params):
        logp = forward(model, params, tokens, lengths, None, 1.0)[0]
        return jnp.sum(jnp.sin(logp)), logp

    (_, logp), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return logp, grads


def assert_close(actual, expected):
    def compare(a, b):
        np.testing.assert_allclose(a, b, atol=2e-4 * max(1.0, float(np.abs(np.asarray(b)).max())))

    jax.tree.map(compare, actual, expected)


@pytest.fixture(scope="module")
def one_device():
    return log_probs(Transformer(LATENT, COMPUTE), PARAMS)


@pytest.mark.parametrize(
    "mesh",
    [{"fsdp": 2, "tensor": 2}, {"context": 2, "expert": 2}],
    ids=lambda mesh: "-".join(f"{axis}{n}" for axis, n in mesh.items()),
)
def test_a_mesh_computes_what_one_device_does(one_device, mesh):
    MeshConfig(**mesh).validate("mesh", LATENT)
    placement = Placement(make_mesh(MeshConfig(**mesh)))
    params = place(PARAMS, LATENT, placement)
    attention = params["run_0"]["layer_0"]["attention"]
    parts = mesh.get("fsdp", 1) * mesh.get("context", 1) * mesh.get("tensor", 1)
    for name in ("q_b", "kv_b", "o"):  # stored in parts
        w = attention[name]
        assert w.addressable_shards[0].data.size * parts == w.size
    assert_close(log_probs(Transformer(LATENT, COMPUTE, placement=placement), params), one_device)


def test_the_kernel_computes_what_the_portable_code_does(monkeypatch):
    """Heads of 160 channels are padded to full lanes; values have 128 channels."""
    monkeypatch.setattr(kernels, "INTERPRET", True)
    config = dataclasses.replace(
        LATENT,
        layers=1,
        heads=2,
        kv_heads=2,
        head_dim=160,
        moe=dataclasses.replace(LATENT.moe, dense_layers=()),
        mla=dataclasses.replace(LATENT.mla, rope_dim=64, value_dim=128),
    )
    params = random_params(config)
    tokens = jnp.asarray(np.random.default_rng(1).integers(2, 40, (1, 256)), jnp.int32)
    lengths = jnp.array([256], jnp.int32)
    called, real = [], kernels.splash_causal
    monkeypatch.setattr(
        "compass_jax.model.attention.splash_causal",
        lambda q, *rest: called.append(q.shape[-1]) or real(q, *rest),
    )
    results = [
        log_probs(
            Transformer(config, dataclasses.replace(COMPUTE, attention=kernel)),
            params,
            tokens,
            lengths,
        )
        for kernel in ("splash", "portable")
    ]
    assert set(called) == {256}
    assert_close(*results)


@pytest.mark.parametrize("config", [LATENT, DIRECT], ids=["two matrices of queries", "one"])
def test_adapters_are_those_of_the_merged_matrices(config):
    lora = LoRAConfig(rank=2, alpha=4.0, targets=("q_proj", "v_proj", "o_proj"))
    adapters = init_adapters(config, lora, jax.random.key(1))
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape)), adapters)
    params = combine(random_params(config), adapters, lora.scale)
    places = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_low_rank)[0]
    names = {path[-1].key for path, leaf in places if is_low_rank(leaf)}
    queries = {"q_a", "q_b"} if config.mla.q_rank else {"q"}
    assert names == queries | {"kv_a", "kv_b", "o"}
    model = Transformer(config, COMPUTE)
    low, full = (log_probs(model, x)[0] for x in (params, merged(params)))
    assert_close(low, full)
    assert np.abs(np.asarray(low - log_probs(model, random_params(config))[0])).max() > 0.1


def test_adapters_are_exported_by_the_names_of_transformers():
    lora = LoRAConfig(rank=2, targets=("q_proj", "k_proj", "o_proj"))
    tensors = peft_tensors(init_adapters(LATENT, lora, jax.random.key(1)), LATENT, lora)
    last = {name.rpartition(".lora_")[0] for name in tensors if ".layers.2." in name}
    modules = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    assert last == {f"base_model.model.model.layers.2.self_attn.{x}" for x in modules}
    name = "base_model.model.model.layers.2.self_attn.kv_b_proj.lora"
    shapes = tensors[f"{name}_A.weight"].shape, tensors[f"{name}_B.weight"].shape
    assert shapes == ((2, 12), (4 * (8 + 10), 2))


@pytest.mark.parametrize("kind", ["off", "int8"])
def test_rollouts_of_8_bits_are_close_to_training(kind):
    """Weights, keys and values are stored in 8 bits. With "off" the rollout agrees to float32
    precision.
    """
    rollout = dataclasses.replace(ROLLOUT, kv_quantize=kind, cache_pages=24, page_tokens=4)
    decode = sync_weights(PARAMS, LATENT, "float32", kind, stored=True)[0]
    prompts = [make_prompt(i, n) for i, n in enumerate((3, 8, 5))]
    job = Collection(Engine(LATENT, COMPUTE, rollout, EOS), decode, prompts, 2, Purpose.TRAIN, 0)
    samples = {x.row: x for x in job}
    tokens, gaps = np.zeros((len(samples), 28), np.int32), []
    lengths = jnp.array([len(samples[row].tokens) for row in sorted(samples)], jnp.int32)
    for row, x in samples.items():
        tokens[row, : len(x.tokens)] = x.tokens
    model, routes = Transformer(LATENT, COMPUTE), jnp.asarray(job.routes)[:, :28]
    out = forward(model, PARAMS, jnp.asarray(tokens), lengths, routes, 1.0)
    for row, x in samples.items():
        answer = slice(len(x.prompt.tokens), len(x.tokens))
        gaps.extend(np.abs(out[0][row, answer] - x.logp[answer]))
    low, high = {"off": (0, 1e-4), "int8": (1e-4, 0.1)}[kind]
    assert low <= np.mean(gaps) < high


def test_the_cache_has_the_keys_and_values_of_every_head():
    cache = init_cache(LATENT, 3, 16, COMPUTE)
    for layer in cache:
        assert (layer.k.shape, layer.v.shape) == ((3, 4, 16, 12), (3, 4, 16, 10))
    numbers = sum(x.size for x in jax.tree.leaves(cache))
    assert numbers == 3 * 16 * LATENT.layers * LATENT.cache_width


@pytest.mark.parametrize("config", [LATENT, DIRECT, MODEL])
def test_the_counted_weights_are_the_declared_ones(config):
    specs = jax.tree.leaves(param_specs(config)["run_0"]["layer_0"]["attention"], is_leaf=is_spec)
    declared = sum(np.prod(x.shape[1:]) for x in specs if x.quantised)
    assert config.attention_weights == declared
    decode = jax.tree.leaves(to_decode(random_params(config)))
    assert len(decode) > 0
    pairs = 30**2 * config.layers * config.heads * (config.head_dim + config.value_dim)
    token = forward_flops(config, [1]) - config.layers * config.heads * (
        config.head_dim + config.value_dim
    )
    assert forward_flops(config, [30]) == pytest.approx(30 * token + pairs)


def test_interleaved_channels_turn_in_pairs():
    """The pairs (x0, x1) and (x2, x3) are rotated by one angle each, as complex numbers, up to the
    order of channels.
    """
    x = np.random.default_rng(0).standard_normal((1, 1, 1, 6))
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * np.array([0.3, 0.2, 0.1]))
    first, second = np.split(np.asarray(deinterleaved(jnp.asarray(x, jnp.float32))), 2, axis=-1)
    angle = np.array([0.3, 0.2, 0.1])
    np.testing.assert_allclose(first * np.cos(angle) - second * np.sin(angle), turned.real, 1e-5)
    np.testing.assert_allclose(second * np.cos(angle) + first * np.sin(angle), turned.imag, 1e-5)


def test_scores_have_yarns_factor_in_latent_attention_alone():
    assert score_factor(LATENT) == pytest.approx((0.1 * 0.8 * np.log(4.0) + 1) ** 2)
    assert score_factor(dataclasses.replace(LATENT, rope_scaling=None)) == 1
    assert score_factor(dataclasses.replace(MODEL, rope_scaling=LATENT.rope_scaling)) == 1


def test_settings_that_do_not_fit_are_refused_all_at_once():
    broken = dataclasses.replace(
        LATENT,
        kv_heads=2,
        qk_norm=True,
        qkv_bias=True,
        mla=dataclasses.replace(LATENT.mla, rope_dim=12),
    )
    with pytest.raises(ConfigError) as caught:
        broken.validate("model")
    for name in ("model.mla.rope_dim = 12", "model.kv_heads = 2", "qk_norm", "qkv_bias"):
        assert name in str(caught.value)
    with pytest.raises(ConfigError, match=r"mesh.fsdp = 8 .* model.mla.kv_rank = 12"):
        MeshConfig(fsdp=8).validate("mesh", LATENT)
