"""MiniMax M2: calls are <invoke> with <parameter> between tags of the namespace minimax (the file
docs/tool_calling_guide.md of MiniMax-M2).
"""

from __future__ import annotations

from compass_jax.base.chat.base import THINK, ChatFormat
from compass_jax.base.chat.marked import invoke_form

FORMAT = ChatFormat(
    "minimax",
    own_thoughts=(THINK,),
    own_calls=(
        invoke_form("<minimax:tool_call>", "</minimax:tool_call>"),
        invoke_form("<function_calls>", "</function_calls>"),
    ),
    ends=("[e~[",),
)
