"""A model small enough to compile in a second: a dense layer among MoE layers, grouped heads,
weights of a trained model's size.
"""

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.base.records import Prompt
from compass_jax.config import ComputeConfig, ModelConfig, MoEConfig, RolloutConfig
from compass_jax.model.params import abstract_params

EOS = 1
MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=40,
    hidden=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=32,
    rope_theta=100.0,
    moe=MoEConfig(experts=6, top_k=2, ffn=16, dense_layers=(1,)),
)
COMPUTE = ComputeConfig(scan_layers=False)
ROLLOUT = RolloutConfig(
    slots=6, prompt_buckets=(8, 16), max_new_tokens=12, tokens_per_call=4, cache_bucket=16
)
UNSET = 255


def random_params(config=MODEL, dtype="float32", seed=0, scale=0.3):
    """Returns stacked parameters with which hidden states depend on every layer, and the end token
    is sampled now and then.
    """
    leaves, structure = jax.tree.flatten(abstract_params(config, dtype))
    rng = np.random.default_rng(seed)
    return structure.unflatten(
        [jnp.asarray(rng.standard_normal(x.shape) * scale, dtype) for x in leaves]
    )


def make_prompt(number, length, visit=0):
    """Returns a prompt of `length` tokens that `number` decides; none of them is the end token."""
    tokens = (
        np.random.default_rng([7, number]).integers(2, MODEL.vocab_size, length).astype(np.int32)
    )
    return Prompt(
        id=1000 + number,
        source=0,
        label="tiny",
        question=f"question {number}",
        tokens=tokens,
        answer=str(number),
        visit=visit,
    )
