"""The tool calls that a text makes, in the forms that chat templates teach.

<tool_call>{"name": "buy", "arguments": {"item": "pen", "n": 2}}</tool_call>     Hermes, Qwen
[{"name": "buy", "arguments": {...}}, ...]                                       JSON
{"buy": ["pen", 2]}         short, for tiny models: arguments by place, or {"buy": {"item": ...}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from compass_jax.tool_calls import MOST_CALLS, MOST_CHARS

BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class Call(NamedTuple):
    """A call of a tool, its arguments by name or by place; `error` says why there is none."""

    name: str
    arguments: dict[str, Any] | list[Any]
    error: str = ""


def calls_in(text: str) -> list[Call]:
    """Returns the calls of a text in their order; none where it makes none. What begins like a call
    and is none is one with an error, and so are more than MOST_CALLS together.
    """
    blocks = BLOCK.findall(text)
    if not blocks and text.lstrip().startswith(("{", "[")):
        blocks = [text]
    if len(blocks) > MOST_CALLS or len(text) > MOST_CHARS:
        return [_wrong(f"more than {MOST_CALLS} calls, or than {MOST_CHARS:,} characters")]
    calls = [call for block in blocks for call in _of_block(block)]
    return calls if len(calls) <= MOST_CALLS else [_wrong(f"more than {MOST_CALLS} calls")]


def _of_block(block: str) -> list[Call]:
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return [_wrong("no JSON")]
    return [_of_value(one) for one in (value if isinstance(value, list) else [value])]


def _of_value(value: Any) -> Call:
    if isinstance(value, dict) and "name" in value:
        name, arguments = value["name"], value.get("arguments", {})
    elif isinstance(value, dict) and len(value) == 1:
        ((name, arguments),) = value.items()
    else:
        return _wrong("a call has a name and arguments")
    if not (isinstance(name, str) and isinstance(arguments, dict | list)):
        return _wrong("a call has a name and arguments")
    return Call(name, arguments)


def _wrong(why: str) -> Call:
    return Call("", {}, why)


def named(call: Call, names: Sequence[str], optional: int = 0) -> dict[str, Any]:
    """The arguments of a call by name. Raises ValueError, naming them, where some of `names` are
    missing (the last `optional` may be), or others are given.
    """
    given = call.arguments
    if isinstance(given, list):
        if len(given) > len(names):
            raise ValueError(f"{call.name} takes {', '.join(names) or 'no arguments'}")
        given = dict(zip(names, given, strict=False))
    missing = [name for name in names[: len(names) - optional] if name not in given]
    extra = [name for name in given if name not in names]
    if missing or extra:
        raise ValueError(f"{call.name} takes {', '.join(names) or 'no arguments'}")
    return given
