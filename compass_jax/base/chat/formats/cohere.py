"""Command A: thoughts, calls and answers each have their own pair of marks
(https://docs.cohere.com/docs/command-a-hf).
"""

from __future__ import annotations

from compass_jax.base.chat.base import ChatFormat
from compass_jax.base.chat.marked import json_form

FORMAT = ChatFormat(
    "cohere",
    own_thoughts=(("<|START_THINKING|>", "<|END_THINKING|>"),),
    own_calls=(json_form("<|START_ACTION|>", "<|END_ACTION|>"),),
    ends=("<|END_OF_TURN_TOKEN|>",),
    template=("<|CHATBOT_TOKEN|>",),
    frames=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
