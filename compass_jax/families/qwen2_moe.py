"""Qwen2 and Qwen1.5 with experts: one more expert, which every token takes, has a sigmoid gate."""

from __future__ import annotations

from compass_jax.families.base import MOE_KEYS, QWEN, Attention, Family

_SHARED = {
    "shared_ffn": "shared_expert_intermediate_size",
    "shared_gate": "shared_expert_gate",  # in no config.json: the class always has the gate
}
FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    moe_keys=MOE_KEYS | _SHARED,
    attention=(
        Attention(qk_norm=False, qkv_bias=True, o_bias=False),
        Attention(qk_norm=False, qkv_bias=False, o_bias=False),
    ),
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
