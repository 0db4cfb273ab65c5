"""Tools of /v1/chat/completions: the functions that a request offers, and the calls that an answer
makes of them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from compass_jax.serving.errors import BadRequest, shown
from compass_jax.tool_calls import MalformedCall, ToolCall, call_span, tool_calls

MOST_TOOLS = 128
_NAME = re.compile(r"[\w.:-]{1,128}")
_FUNCTION = frozenset({"name", "description", "parameters", "strict"})
_OPEN = "<tool_call>"
# where a call may begin anywhere in a text, and texts that only their beginning makes calls
_MARKERS = (_OPEN, "```", "[TOOL_CALLS]")
_LONGEST = max(map(len, _MARKERS))
_MAY_BE_CALL = re.compile(r"\s*(?:[\[{].*|[A-Za-z_][\w.]*(?:\(.*)?)?", re.DOTALL)
_THOUGHT_ENDS = "</think>"


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the tools that a body offers and lets the model choose from, as chat templates read
    them; none for `tool_choice` "none". BadRequest for what is no tool, and for another choice.
    """
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRequest(f"tools = {shown(tools)}: must be a list of functions", "tools")
    if len(tools or []) > MOST_TOOLS:
        raise BadRequest(f"{len(tools or [])} tools are more than {MOST_TOOLS}", "tools")
    found = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or [])]
    names = [tool["function"]["name"] for tool in found]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise BadRequest(f"tools has {shown(double)} more than once", "tools")
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto") or isinstance(choice, list | dict):
        text = "this server cannot force a call: use auto or none"
        raise BadRequest(f"tool_choice = {shown(choice)} is not supported; {text}", "tool_choice")
    if choice == "auto" and not found:
        raise BadRequest("tool_choice = 'auto' needs tools", "tool_choice")
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and parallel is not True:
        text = "this server cannot bound the number of calls: leave it out"
        message = f"parallel_tool_calls = {shown(parallel)} is not supported; {text}"
        raise BadRequest(message, "parallel_tool_calls")
    return [] if choice == "none" else found


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function" or len(tool) != 2:
        text = "must be {type: function, function: {name, description, parameters}}"
        raise BadRequest(f"{where} = {shown(tool)}: {text}", "tools")
    if unknown := sorted(set(function) - _FUNCTION):
        raise BadRequest(f"{where}.function has the unknown field {unknown[0][:80]!r}", "tools")
    name, strict = function.get("name"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        text = "must be a name of letters, digits and . _ : -"
        raise BadRequest(f"{where}.function.name = {shown(name)}: {text}", "tools")
    if strict not in (None, False):
        text = "this server does not constrain what the model writes: leave it out"
        raise BadRequest(f"{where}.function.strict = {shown(strict)}: {text}", "tools")
    for field, kind in (("description", str), ("parameters", dict)):
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            raise BadRequest(
                f"{where}.function.{field} = {shown(value)}: must be of type {kind.__name__}",
                "tools",
            )
    given = {k: v for k, v in function.items() if v is not None and k != "strict"}
    return {"type": "function", "function": given}


class Parted(NamedTuple):
    """A text without its calls, and these as OpenAI's API has them."""

    content: str
    calls: list[dict[str, Any]]


def part_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> Parted:
    """Returns the calls of a whole answer, and its text without them.

    Between <tool_call> tags a call may name any tool. Another form is a call where `tools` has its
    name: an answer may be JSON or a program. A call that cannot be read stays in the text.
    """
    try:
        calls = tool_calls(text)
    except MalformedCall:
        return Parted(text, [])
    begin, end = call_span(text)
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    written = [_written(call, functions) for call in calls]
    tagged = text.startswith(_OPEN, begin)
    if not calls or None in written or not (tagged or all(x.name in functions for x in calls)):
        return Parted(text, [])
    before, after = text[:begin].rstrip(), text[end:].strip()
    return Parted(before + (f"\n{after}" if after else ""), [x for x in written if x])


def _written(call: ToolCall, functions: Mapping[str, Any]) -> dict[str, Any] | None:
    """The call as OpenAI's API has it; None where its arguments by position have no names."""
    parameters = functions.get(call.name, {}).get("parameters") or {}
    properties = parameters.get("properties")
    names = list(properties) if isinstance(properties, dict) else []
    given = dict(zip(names, call.positional))
    if len(call.positional) > len(names) or given.keys() & call.arguments.keys():
        return None
    arguments = json.dumps({**given, **call.arguments}, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class CallStream:
    """Text in pieces, out of which calls are taken. What may be a call is held back until the end:
    only the whole text says whether it is one.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        self._tools = tools
        self._text = ""
        self._sent = 0  # characters that were handed on

    def push(self, text: str, last: bool) -> Parted:
        """Returns the text that is certainly no call; with `last` the rest, and the calls."""
        self._text += text
        if last:
            whole = part_calls(self._text, self._tools)
            return Parted(whole.content[self._sent :], whole.calls)
        certain = self._certain()
        fresh = self._text[self._sent : certain]
        self._sent = max(self._sent, certain)
        return Parted(fresh, [])

    def _certain(self) -> int:
        """The characters before the first one with which a call may begin. What precedes the end of
        a thought is no call; white space before a call goes with it.
        """
        text = self._text
        answer = text.rfind(_THOUGHT_ENDS) + len(_THOUGHT_ENDS) if _THOUGHT_ENDS in text else 0
        starts = [at for x in _MARKERS if (at := text.find(x, answer)) >= 0]
        starts += [at for at in (0, answer) if _MAY_BE_CALL.fullmatch(text, at)]
        sizes = range(min(_LONGEST, len(text)), 0, -1)
        begun = next((n for n in sizes if _begins_marker(text[-n:])), 0)
        return len(text[: min([len(text) - begun, *starts])].rstrip())


def _begins_marker(text: str) -> bool:
    return any(marker.startswith(text) for marker in _MARKERS)
