"""Qwen3, dense. Its class has a default head size; those of the other families divide."""

from __future__ import annotations

from compass_jax.families.base import QWEN, Family

FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    defaults={**QWEN, "attention_bias": False, "head_dim": 128},
)
