"""Qwen2, dense: queries, keys and values always have a bias; no QK norm."""

from compass_jax.model.families.base import COMMON, Attention, Family

QWEN = {**COMMON, "max_position_embeddings": 32_768, "use_sliding_window": False}
FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    attention=(Attention(qkv_bias=True),),
    defaults=QWEN,
)
