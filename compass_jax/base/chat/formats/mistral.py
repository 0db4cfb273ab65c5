"""Mistral: calls are a JSON list after [TOOL_CALLS], or a name, [ARGS] and JSON from tokenizer v11
on; thoughts are between [THINK] and [/THINK] (https://docs.mistral.ai/guides/tokenization/).
"""

from __future__ import annotations

from compass_jax.base.chat.base import ChatFormat
from compass_jax.base.chat.marked import CallForm, parse_mistral

FORMAT = ChatFormat(
    "mistral",
    own_thoughts=(("[THINK]", "[/THINK]"),),
    own_calls=(CallForm("[TOOL_CALLS]", parse_mistral),),
    ends=("</s>",),
    template=("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[ARGS]"),
)
