"""Logits and greedy tokens against transformers (torch, CPU, float32) on random weights, read by
load_params from save_pretrained's files.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import randomise

from compass_jax.config import ComputeConfig
from compass_jax.model.logprobs import head_weights, logits_of, token_logprobs
from compass_jax.model.params import to_decode
from compass_jax.model.transformer import Transformer, apply, init_cache
from compass_jax.weights.hf import load_params
from compass_jax.weights.hf_config import read_hf_config

COMMON = dict(
    vocab_size=199,
    hidden_size=48,
    intermediate_size=72,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
)
CASES = {
    # experts in decoder layers 1 and 5 of 6; head size times heads is not the hidden size
    "moe_sparse_step": dict(
        COMMON,
        model_type="qwen3_moe",
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        tie_word_embeddings=False,
        rope_theta=10_000.0,
    ),
    # a dense layer first, weights not normalised, biases, one key-value head, tied
    "moe_tied_biased": dict(
        COMMON,
        model_type="qwen3_moe",
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=[0],
        tie_word_embeddings=True,
        attention_bias=True,
        rope_theta=500.0,
    ),
    "qwen3": dict(
        COMMON,
        model_type="qwen3",
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        rope_theta=1_000_000.0,
    ),
    "qwen2": dict(
        COMMON,
        model_type="qwen2",
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        tie_word_embeddings=False,
        rope_theta=10_000.0,
    ),
}
PROMPTS, NEW = np.array([[3, 141, 59, 26, 53, 58, 97], [9, 79, 32, 38, 46, 26, 43]], np.int32), 64


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """Returns (torch model, config, parameters read from its saved checkpoint)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    raw = dict(CASES[request.param])
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(raw.pop("model_type"), **raw), dtype=torch.float32
    ).eval()
    # with other seeds the random models repeat a few tokens for ever
    randomise(model, seed=5 if request.param == "moe_tied_biased" else 3)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    config = read_hf_config(folder)
    return model, config, load_params(folder, config, "float32")


def test_logits_equal_transformers(pair):
    import torch

    model, config, params = pair
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (3, 33)).astype(np.int32)
    with torch.no_grad():
        expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    positions = jnp.broadcast_to(jnp.arange(33), tokens.shape)
    run = jax.jit(
        lambda p, x: (
            apply(Transformer(config), p, x, positions, mask=jnp.ones(x.shape, bool)).hidden
        )
    )
    out = run(params, jnp.asarray(tokens))
    actual = np.asarray(logits_of(out, head_weights(params)))
    assert expected.std() >= 1
    np.testing.assert_allclose(actual, expected, atol=5e-5, rtol=0)


def test_log_probs_of_the_columns_that_a_tokenizer_has_equal_transformers(pair):
    import torch

    model, config, params = pair
    known = config.vocab_size - 40
    tokens = np.random.default_rng(1).integers(0, known, (2, 9)).astype(np.int32)
    with torch.no_grad():
        logits = model(torch.tensor(tokens, dtype=torch.long)).logits[:, :-1, :known]
    logp = logits.log_softmax(-1)
    expected = logp.gather(-1, torch.tensor(tokens[:, 1:, None], dtype=torch.long))[..., 0].numpy()
    positions = jnp.broadcast_to(jnp.arange(9), tokens.shape)
    hidden = apply(
        Transformer(config), params, jnp.asarray(tokens), positions, mask=jnp.ones((2, 9), bool)
    ).hidden
    actual, entropy = token_logprobs(
        hidden, head_weights(params), jnp.asarray(tokens), 1.0, 5, known=known
    )
    np.testing.assert_allclose(actual[:, 1:], expected, atol=5e-5, rtol=0)
    np.testing.assert_allclose(
        entropy[:, 1:], -(logp.exp() * logp).sum(-1).numpy(), atol=5e-5, rtol=0
    )


def greedy(config, params, prompts, new):
    """Generates tokens by argmax through the KV cache: one prefill, then one token at a time."""
    model, decode = Transformer(config, ComputeConfig(), layout="decode"), to_decode(params)

    @jax.jit
    def step(decode, tokens, positions, cache):
        out = apply(
            model, decode, tokens, positions, mask=jnp.ones(tokens.shape, bool), cache=cache
        )
        return jnp.argmax(logits_of(out.hidden[:, -1], head_weights(decode)), axis=-1).astype(
            jnp.int32
        )[:, None], out.cache

    start = prompts.shape[1]
    cache = init_cache(config, len(prompts), start + new, ComputeConfig())
    token, cache = step(
        decode, jnp.asarray(prompts), jnp.broadcast_to(jnp.arange(start), prompts.shape), cache
    )
    generated = [token]
    for i in range(new - 1):
        token, cache = step(decode, token, jnp.full((len(prompts), 1), start + i), cache)
        generated.append(token)
    return np.concatenate(generated, axis=1)


def test_greedy_tokens_equal_transformers(pair):
    import torch

    model, config, params = pair
    prompts = torch.tensor(PROMPTS, dtype=torch.long)
    with torch.no_grad():
        options = dict(
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)[
            :, PROMPTS.shape[1] :
        ].numpy()
    actual = greedy(config, params, PROMPTS, NEW)
    assert min(len(set(row)) for row in expected.tolist()) >= 16
    np.testing.assert_array_equal(actual, expected)
