"""Mistral: Llama's layers with a sliding window of attention in every layer (none from v0.2 on)."""

from __future__ import annotations

from compass_jax.families.base import Attention, Family
from compass_jax.families.rope import SCALED
from compass_jax.families.windows import Windows

FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    attention=(Attention(qk_norm=False, qkv_bias=False, o_bias=False),),
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131_072,
        "rope_theta": 10_000.0,
        "sliding_window": 4096,
    },
    rope=SCALED,
    windows=Windows(acts=True),
)
