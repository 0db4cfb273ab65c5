"""Seed-OSS: thoughts and calls have tags of the namespace seed (the model card of
Seed-OSS-36B-Instruct).
"""

from __future__ import annotations

from compass_jax.base.chat.base import ChatFormat
from compass_jax.base.chat.marked import tagged_form

FORMAT = ChatFormat(
    "seed",
    own_thoughts=(("<seed:think>", "</seed:think>"),),
    own_calls=(tagged_form("<seed:tool_call>", "</seed:tool_call>"),),
    ends=("<seed:eos>",),
)
