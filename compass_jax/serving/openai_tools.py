"""Tool calls in the answers of /v1/chat/completions."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from compass_jax.aliases import JsonMapping, JsonObject
from compass_jax.tool_calls import MalformedCall, ToolCall, call_span, tool_calls

_OPEN = "<tool_call>"
# marks that may begin a call anywhere in a text; then forms that are calls only at its beginning
_MARKERS = (_OPEN, "```", "[TOOL_CALLS]")
_LONGEST = max(map(len, _MARKERS))
_MAY_BE_CALL = re.compile(r"\s*(?:[\[{].*|[A-Za-z_][\w.]*(?:\(.*)?)?", re.DOTALL)
_THOUGHT_ENDS = "</think>"


class ParsedCalls(NamedTuple):
    """A text without its calls, and the calls in the format of OpenAI's API."""

    content: str
    calls: list[JsonObject]


def part_calls(text: str, tools: Sequence[JsonMapping]) -> ParsedCalls:
    """Returns the calls of a complete answer, and its text without them.

    Between <tool_call> tags, a call may name any tool. In other formats it is a call only if
    `tools` contains its name, because an answer may itself be JSON or a program. A call that cannot
    be parsed remains in the text.
    """
    try:
        calls = tool_calls(text)
    except MalformedCall:
        return ParsedCalls(text, [])
    begin, end = call_span(text)
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    formatted = [_format_call(call, functions) for call in calls]
    tagged = text.startswith(_OPEN, begin)
    if not calls or None in formatted or not (tagged or all(x.name in functions for x in calls)):
        return ParsedCalls(text, [])
    before, after = text[:begin].rstrip(), text[end:].strip()
    return ParsedCalls(before + (f"\n{after}" if after else ""), [x for x in formatted if x])


def _format_call(call: ToolCall, functions: JsonMapping) -> JsonObject | None:
    """Returns OpenAI's form of a call; None if positional arguments have no names."""
    parameters = functions.get(call.name, {}).get("parameters") or {}
    properties = parameters.get("properties")
    names = list(properties) if isinstance(properties, dict) else []
    positional = dict(zip(names, call.positional))
    if len(call.positional) > len(names) or positional.keys() & call.arguments.keys():
        return None
    arguments = json.dumps({**positional, **call.arguments}, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class CallStream:
    """A stream of text from which calls are removed. Text that may be part of a call is held back
    until the end, since only the complete text shows whether it is a call.
    """

    def __init__(self, tools: Sequence[JsonMapping]):
        self._tools = tools
        self._text = ""
        self._sent = 0  # number of characters returned so far

    def push(self, text: str, last: bool) -> ParsedCalls:
        """Returns the text that is part of no call; with `last`, all of it and the calls."""
        self._text += text
        if last:
            parted = part_calls(self._text, self._tools)
            return ParsedCalls(parted.content[self._sent :], parted.calls)
        certain = self._certain()
        fresh = self._text[self._sent : certain]
        self._sent = max(self._sent, certain)
        return ParsedCalls(fresh, [])

    def _certain(self) -> int:
        """Returns the number of characters before the first possible beginning of a call. Text
        before the end of a thought is not a call. White space before a call belongs to the call.
        """
        text = self._text
        answer = text.rfind(_THOUGHT_ENDS) + len(_THOUGHT_ENDS) if _THOUGHT_ENDS in text else 0
        starts = [at for x in _MARKERS if (at := text.find(x, answer)) >= 0]
        starts += [at for at in (0, answer) if _MAY_BE_CALL.fullmatch(text, at)]
        sizes = range(min(_LONGEST, len(text)), 0, -1)
        partial = next((n for n in sizes if _begins_marker(text[-n:])), 0)
        return len(text[: min([len(text) - partial, *starts])].rstrip())


def _begins_marker(text: str) -> bool:
    return any(marker.startswith(text) for marker in _MARKERS)
