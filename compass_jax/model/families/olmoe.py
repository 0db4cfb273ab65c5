"""OLMoE: experts in every layer; a norm of queries and keys covers all heads together."""

from compass_jax.model.families.base import COMMON, MOE_KEYS, Attention, Family
from compass_jax.model.families.rope import SCALED

FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    moe_keys=MOE_KEYS | {"ffn": "intermediate_size"},
    attention=(
        Attention(qk_norm=True, qk_norm_scope="projection"),
        Attention(qk_norm=True, qkv_bias=True, o_bias=True, qk_norm_scope="projection"),
    ),
    defaults={
        **COMMON,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    fixed={"decoder_sparse_step": 1, "mlp_only_layers": []},
    own_kv_heads=True,
    rope=SCALED,
)
