"""Llama, Llama 3 and models of its class, such as SmolLM2: no QK norm; rotary embeddings may be
scaled.
"""

from compass_jax.model.families.base import COMMON, Attention, Family
from compass_jax.model.families.rope import SCALED

FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    attention=(Attention(), Attention(qkv_bias=True, o_bias=True)),
    defaults={**COMMON, "max_position_embeddings": 2048, "attention_bias": False},
    own_kv_heads=True,
    rope=SCALED,
)
