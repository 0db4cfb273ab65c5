"""Mistral: Llama's layers with a sliding window of attention in every layer (none from v0.2 on)."""

from compass_jax.model.families.base import COMMON, Attention, Family
from compass_jax.model.families.rope import SCALED
from compass_jax.model.families.windows import Windows

FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    attention=(Attention(),),
    defaults={**COMMON, "max_position_embeddings": 131_072, "sliding_window": 4096},
    rope=SCALED,
    windows=Windows(acts=True),
)
