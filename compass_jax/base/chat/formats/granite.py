"""Granite 3 and Phi-4-mini: calls are JSON after <|tool_call|>; thoughts have <think> tags (the
model cards of granite-3.3-8b-instruct and Phi-4-mini-instruct).
"""

from __future__ import annotations

from compass_jax.base.chat.base import THINK, ChatFormat
from compass_jax.base.chat.marked import json_form

FORMAT = ChatFormat(
    "granite",
    own_thoughts=(THINK,),
    own_calls=(json_form("<|tool_call|>", "<|/tool_call|>"),),
    ends=("<|end_of_text|>",),
    template=("<|start_of_role|>", "<|end_of_role|>"),
)
