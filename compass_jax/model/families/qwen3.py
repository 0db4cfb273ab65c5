"""Qwen3, dense. Its class has a default head size; those of the other families divide."""

from compass_jax.model.families.base import Family
from compass_jax.model.families.qwen2 import QWEN

FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    defaults={**QWEN, "attention_bias": False, "head_dim": 128},
)
