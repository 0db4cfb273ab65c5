"""DeepSeek-V3, DeepSeek-R1 and models of their shape: multi-head latent attention, a sigmoid router
with a selection bias and groups of experts, shared experts and dense first layers. Layers that
predict further tokens are ignored.
"""

from compass_jax.model.families.base import COMMON, Attention, Family
from compass_jax.model.families.fields import KEYS, MLA_KEYS, NOPE_KEY
from compass_jax.model.families.glm4_moe import EXPERT_KEYS, SHARED_TENSORS, SIGMOID_KEYS

FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    keys=KEYS | {"head_dim": NOPE_KEY},
    moe_keys=EXPERT_KEYS,
    mla_keys=MLA_KEYS,
    tensors=SHARED_TENSORS,
    attention=(Attention(),),
    defaults={
        **COMMON,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
    },
    fixed={"decoder_sparse_step": 1},
    served={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    # The published folders bring code with the maths of transformers' class, and settings of
    # pretraining's losses. The class computes head_dim and qk_head_dim from other keys.
    unread=("auto_map", "aux_loss_alpha", "seq_aux", "ep_size", "head_dim", "qk_head_dim"),
    router="sigmoid",
    router_keys=SIGMOID_KEYS,
    rope=("yarn",),
    extra_layers=True,
)
