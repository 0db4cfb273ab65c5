"""Llama-Nemotron: calls are a JSON list between <TOOLCALL> tags; thoughts have <think> tags (the
model card of Llama-3.3-Nemotron-Super-49B-v1.5).
"""

from __future__ import annotations

from compass_jax.base.chat.base import THINK, ChatFormat
from compass_jax.base.chat.marked import json_form

FORMAT = ChatFormat(
    "nemotron",
    own_thoughts=(THINK,),
    own_calls=(json_form("<TOOLCALL>", "</TOOLCALL>"),),
    ends=("<|eot_id|>",),
)
