"""Mixtral: Mistral with experts in every layer. Its config.json lacks the normalisation of the
chosen experts' weights; its class divides them by their sum.
"""

from compass_jax.model.families.base import COMMON, MOE_KEYS, TENSORS, Attention, Family, renamed
from compass_jax.model.families.rope import SCALED
from compass_jax.model.families.windows import Windows

_NAMES = {
    "mlp.gate.": "block_sparse_moe.gate.",
    "mlp.experts.{e}.gate_proj": "block_sparse_moe.experts.{e}.w1",
    "mlp.experts.{e}.up_proj": "block_sparse_moe.experts.{e}.w3",
    "mlp.experts.{e}.down_proj": "block_sparse_moe.experts.{e}.w2",
}
FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    moe_keys=MOE_KEYS | {"experts": "num_local_experts", "ffn": "intermediate_size"},
    tensors=renamed(TENSORS, _NAMES),
    attention=(Attention(),),
    defaults={
        **COMMON,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "num_experts_per_tok": 2,
    },
    fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    rope=SCALED,
    windows=Windows(acts=True),
)
