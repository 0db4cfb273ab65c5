"""Llama: no biases, and queries and keys are not normalised. SmolLM2 is one, and so is a Mistral
whose config.json says `"sliding_window": null` (with its own model_type).
"""

from dataclasses import replace

from compass_jax.families.base import Attention, Family

FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    attention=(Attention(qk_norm=False, qkv_bias=False, o_bias=False),),
)
MISTRAL = replace(FAMILY, model_type="mistral", architecture="MistralForCausalLM")
