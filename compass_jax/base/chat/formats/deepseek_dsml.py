"""DeepSeek V3.2 and V4: calls are <invoke> with <parameter> whose names begin with the mark DSML
(the encoding published with the models).
"""

from __future__ import annotations

from compass_jax.base.chat.base import THINK, ChatFormat
from compass_jax.base.chat.marked import invoke_form

FORMAT = ChatFormat(
    "deepseek_dsml",
    own_thoughts=(THINK,),
    own_calls=tuple(
        invoke_form(f"<｜DSML｜{name}>", f"</｜DSML｜{name}>", "｜DSML｜")
        for name in ("tool_calls", "function_calls")
    ),
    ends=("<｜end▁of▁sentence｜>",),
    template=("<｜Assistant｜>", "｜DSML｜parameter"),
)
