"""Qwen2 and Qwen1.5 with experts: one more expert, which every token takes, has a sigmoid gate."""

from compass_jax.model.families.base import MOE_KEYS, Attention, Family
from compass_jax.model.families.qwen2 import QWEN

_SHARED = {
    "shared_ffn": "shared_expert_intermediate_size",
    "shared_gate": "shared_expert_gate",  # in no config.json: the class always has the gate
}
FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    moe_keys=MOE_KEYS | _SHARED,
    attention=(Attention(qkv_bias=True), Attention()),
    bias_key="qkv_bias",
    defaults={
        **QWEN,
        "qkv_bias": True,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    fixed={"shared_expert_gate": True},
)
