"""Qwen2, dense: queries, keys and values always have a bias; no QK norm."""

from __future__ import annotations

from compass_jax.families.base import QWEN, Attention, Family

FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    attention=(Attention(qk_norm=False, qkv_bias=True, o_bias=False),),
    defaults=QWEN,
)
