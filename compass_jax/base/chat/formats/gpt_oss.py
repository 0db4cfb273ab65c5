"""gpt-oss: an answer is made of messages with channels; only those of the channel final are the
answer, those to a function are calls, and the others are thoughts
(https://cookbook.openai.com/articles/openai-harmony).
"""

from __future__ import annotations

from compass_jax.base.chat.base import ChatFormat

FORMAT = ChatFormat(
    "gpt_oss",
    ends=("<|return|>", "<|call|>", "<|endoftext|>"),
    template=("<|channel|>", "<|message|>"),
    channels=True,
)
