"""GLM-4.5 and later, and Laguna: calls are a name with <arg_key> and <arg_value> between tags
(https://docs.z.ai/guides/llm/glm-4.5). The next message's opening ends a turn.
"""

from __future__ import annotations

from compass_jax.base.chat.base import TAGGED, THINK, ChatFormat

FORMAT = ChatFormat(
    "glm",
    own_thoughts=(THINK,),
    own_calls=(TAGGED,),
    ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
    template=("<arg_key>", "<arg_value>", "[gMASK]", "<|observation|>"),
)
