"""Qwen3 with experts in some or all layers."""

from compass_jax.model.families.base import MOE_KEYS, Family
from compass_jax.model.families.qwen2 import QWEN

_EXPERTS = {
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    moe_keys=MOE_KEYS,
    defaults={**QWEN, "attention_bias": False, **_EXPERTS},
)
