"""DeepSeek V3, R1 and V3.1: calls are a name and JSON between marks of control tokens (the files
tokenizer_config.json and the model card's "ToolCall" of DeepSeek-V3.1).
"""

from __future__ import annotations

from compass_jax.base.chat.base import THINK, ChatFormat
from compass_jax.base.chat.marked import CallForm, parse_deepseek

FORMAT = ChatFormat(
    "deepseek",
    own_thoughts=(THINK,),
    own_calls=(
        CallForm("<｜tool▁calls▁begin｜>", parse_deepseek, "<｜tool▁calls▁end｜>"),
        CallForm("<｜tool▁call▁begin｜>", parse_deepseek, "<｜tool▁call▁end｜>"),
    ),
    ends=("<｜end▁of▁sentence｜>",),
    template=("<｜Assistant｜>", "<｜tool▁sep｜>"),
)
