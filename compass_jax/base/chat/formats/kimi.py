"""Kimi K2: calls have ids such as functions.name:0 and JSON between marks
(https://huggingface.co/moonshotai/Kimi-K2-Instruct, docs/tool_call_guidance.md).
"""

from __future__ import annotations

from compass_jax.base.chat.base import THINK, ChatFormat
from compass_jax.base.chat.marked import CallForm, parse_kimi

FORMAT = ChatFormat(
    "kimi",
    own_thoughts=(THINK,),
    own_calls=(CallForm("<|tool_calls_section_begin|>", parse_kimi, "<|tool_calls_section_end|>"),),
    ends=("<|im_end|>", "<|endoftext|>"),
    template=("<|tool_call_argument_begin|>", "<|im_middle|>", "<|im_assistant|>"),
)
