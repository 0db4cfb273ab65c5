"""GLM-4.5 and GLM-4.6: a sigmoid router with a selection bias, shared experts, dense first layers,
and rotary embeddings of half a head. Layers that predict further tokens are ignored.
"""

from compass_jax.model.families.base import COMMON, TENSORS, Attention, Family, renamed
from compass_jax.model.families.fields import FIRST_DENSE, MOE_KEYS, SHARED_COUNT
from compass_jax.model.families.rope import SCALED

SIGMOID_KEYS = {
    "groups": "n_group",
    "top_groups": "topk_group",
    "scale": "routed_scaling_factor",
}
EXPERT_KEYS = MOE_KEYS | {
    "experts": "n_routed_experts",
    "dense_layers": FIRST_DENSE,
    "shared_ffn": SHARED_COUNT,
}
SHARED_TENSORS = renamed(TENSORS, {"mlp.shared_expert.": "mlp.shared_experts."})
FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    moe_keys=EXPERT_KEYS,
    tensors=SHARED_TENSORS,
    attention=tuple(Attention(norm, bias) for norm in (False, True) for bias in (False, True)),
    defaults={
        **COMMON,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "attention_bias": False,
        "use_qk_norm": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    fixed={"decoder_sparse_step": 1},
    router="sigmoid",
    router_keys=SIGMOID_KEYS,
    rope=SCALED,
    rotary=0.5,
    extra_layers=True,
)
