"""Qwen2.5, Qwen3 and other models of Hermes's form: calls are JSON between <tool_call> tags
(https://qwen.readthedocs.io/en/latest/framework/function_call.html).
"""

from __future__ import annotations

from compass_jax.base.chat.base import TAGGED, THINK, ChatFormat

FORMAT = ChatFormat(
    "hermes",
    own_thoughts=(THINK,),
    own_calls=(TAGGED,),
    ends=("<|im_end|>", "<|endoftext|>"),
    template=('{"name":', '"arguments":'),
)
