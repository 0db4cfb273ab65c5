"""gpt-oss: biases everywhere, attention sinks, sliding windows in every other layer, and experts
with a clipped activation, whose gate and up alternate in the columns of one tensor.
"""

from compass_jax.model.families.base import COMMON, MOE_KEYS, TENSORS, Attention, Family, Tensor
from compass_jax.model.families.rope import SCALED
from compass_jax.model.families.windows import Windows

_MLP = "model.layers.{i}.mlp."
_TENSORS = {
    "moe.router": Tensor(_MLP + "router.weight", transposed=True),
    "moe.router_bias": Tensor(_MLP + "router.bias"),
    "moe.gate": Tensor(_MLP + "experts.gate_up_proj", fused=True, columns=(0, 2)),
    "moe.up": Tensor(_MLP + "experts.gate_up_proj", fused=True, columns=(1, 2)),
    "moe.down": Tensor(_MLP + "experts.down_proj", fused=True),
    "moe.gate_bias": Tensor(_MLP + "experts.gate_up_proj_bias", fused=True, columns=(0, 2)),
    "moe.up_bias": Tensor(_MLP + "experts.gate_up_proj_bias", fused=True, columns=(1, 2)),
    "moe.down_bias": Tensor(_MLP + "experts.down_proj_bias", fused=True),
}
_EXPERTS = {
    "experts": "num_local_experts",
    "ffn": "intermediate_size",
    "swiglu_limit": "swiglu_limit",
    "router_bias": "router_bias",  # in no config.json: the class always has these two
    "expert_bias": "expert_bias",
}
FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    moe_keys=MOE_KEYS | _EXPERTS,
    tensors={**TENSORS, **_TENSORS},
    attention=(
        Attention(qkv_bias=True, o_bias=True, attention_sinks=True),
        Attention(attention_sinks=True),
    ),
    defaults={
        **COMMON,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": True,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
    },
    fixed={
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_bias": True,
        "expert_bias": True,
    },
    unread=("experts_per_token", "initial_context_length"),  # of the model's own code
    rope=SCALED,
    windows=Windows(acts=True, by_layer=True),
)
