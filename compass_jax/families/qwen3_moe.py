"""Qwen3 with experts in every layer, or in some."""

from __future__ import annotations

from compass_jax.families.base import MOE_KEYS, Family

FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", moe_keys=MOE_KEYS)
