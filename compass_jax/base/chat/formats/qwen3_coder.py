"""Qwen3-Coder, Qwen3.5 and Nemotron 3: calls are <function=name> with <parameter=key> between
<tool_call> tags (the model card of Qwen3-Coder-480B-A35B-Instruct).
"""

from __future__ import annotations

from compass_jax.base.chat.base import TAGGED, THINK, ChatFormat
from compass_jax.base.chat.marked import FUNCTION

FORMAT = ChatFormat(
    "qwen3_coder",
    own_thoughts=(THINK,),
    own_calls=(TAGGED, FUNCTION),
    ends=("<|im_end|>", "<|endoftext|>"),
    template=("<parameter=", "</function>"),
)
