"""CWM (Code World Model): Llama's layers, in some of which a token sees a sliding window alone."""

from compass_jax.model.families.base import Attention, Family
from compass_jax.model.families.windows import Windows

FAMILY = Family(
    "cwm",
    "CwmForCausalLM",
    attention=(Attention(qk_norm=False, qkv_bias=False, o_bias=False),),
    rope=("llama3",),
    windows=Windows(acts=True, by_layer=True),
)
