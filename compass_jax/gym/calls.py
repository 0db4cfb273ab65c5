"""Parser of the tool calls in a text, in the formats of chat templates.

<tool_call>{"name": "buy", "arguments": {"item": "pen", "n": 2}}</tool_call>     Hermes, Qwen
[{"name": "buy", "arguments": {...}}, ...]                                       JSON
{"buy": ["pen", 2]}     short form for tiny models: positional arguments, or {"buy": {"item": ...}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from compass_jax.tool_calls import MOST_CALLS, MOST_CHARS

BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class Call(NamedTuple):
    """A tool call with arguments by name or by position. For an invalid call, `error` is the
    reason.
    """

    name: str
    arguments: dict[str, Any] | list[Any]
    error: str = ""


def calls_in(text: str) -> list[Call]:
    """Returns the calls of a text in their order, or an empty list.

    A malformed call is returned as a Call with an error. A text with more than MOST_CALLS calls
    gives a single Call with an error.
    """
    blocks = BLOCK.findall(text)
    if not blocks and text.lstrip().startswith(("{", "[")):
        blocks = [text]
    if len(blocks) > MOST_CALLS or len(text) > MOST_CHARS:
        return [_invalid_call(f"more than {MOST_CALLS} calls, or than {MOST_CHARS:,} characters")]
    calls = [call for block in blocks for call in _parse_block(block)]
    return calls if len(calls) <= MOST_CALLS else [_invalid_call(f"more than {MOST_CALLS} calls")]


def _parse_block(block: str) -> list[Call]:
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return [_invalid_call("no JSON")]
    return [_parse_call(one) for one in (value if isinstance(value, list) else [value])]


def _parse_call(value: Any) -> Call:
    if isinstance(value, dict) and "name" in value:
        name, arguments = value["name"], value.get("arguments", {})
    elif isinstance(value, dict) and len(value) == 1:
        ((name, arguments),) = value.items()
    else:
        return _invalid_call("a call has a name and arguments")
    if not (isinstance(name, str) and isinstance(arguments, dict | list)):
        return _invalid_call("a call has a name and arguments")
    return Call(name, arguments)


def _invalid_call(why: str) -> Call:
    return Call("", {}, why)


def named(call: Call, names: Sequence[str], optional: int = 0) -> dict[str, Any]:
    """Returns the arguments of a call by name. Raises ValueError, listing `names`, if required
    arguments are missing (the last `optional` may be missing) or unknown ones are given.
    """
    arguments = call.arguments
    if isinstance(arguments, list):
        if len(arguments) > len(names):
            raise ValueError(f"{call.name} takes {', '.join(names) or 'no arguments'}")
        arguments = dict(zip(names, arguments, strict=False))
    missing = [name for name in names[: len(names) - optional] if name not in arguments]
    extra = [name for name in arguments if name not in names]
    if missing or extra:
        raise ValueError(f"{call.name} takes {', '.join(names) or 'no arguments'}")
    return arguments
