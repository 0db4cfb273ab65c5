"""Llama 3: calls are JSON without marks, or follow <|python_tag|>
(https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/).
"""

from __future__ import annotations

from compass_jax.base.chat.base import ChatFormat
from compass_jax.base.chat.marked import CallForm, parse_python_tag

FORMAT = ChatFormat(
    "llama",
    own_calls=(CallForm("<|python_tag|>", parse_python_tag),),
    ends=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    template=("<|start_header_id|>", "<|end_header_id|>"),
)
