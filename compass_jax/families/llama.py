"""Llama, Llama 3 and models of its class, such as SmolLM2: no QK norm; rotary embeddings may be
scaled.
"""

from __future__ import annotations

from compass_jax.aliases import JsonObject
from compass_jax.families.base import Attention, Family
from compass_jax.families.rope import SCALED

DEFAULTS: JsonObject = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "attention_bias": False,
}
FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    attention=(
        Attention(qk_norm=False, qkv_bias=False, o_bias=False),
        Attention(qk_norm=False, qkv_bias=True, o_bias=True),
    ),
    defaults=DEFAULTS,
    own_kv_heads=True,
    rope=SCALED,
)
