"""Parser of tool calls in a model's text, in the formats of chat templates:

    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>            Hermes, Qwen; any number
    [{"name": "f", "arguments": {"a": 1}}]                                 a JSON list, or an object
    {"tool_calls": [{"function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]}       OpenAI's fields
    [f(a=1), g(b='x')]                                                     Python's syntax

The text is untrusted: it is parsed, never evaluated.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

from compass_jax.aliases import Json, JsonMapping, JsonObject
from compass_jax.errors import CompassError
from compass_jax.untrusted import fenced_blocks, parse_json

MOST_CHARS = 100_000  # maximum length of a text with calls
MOST_CALLS = 64
_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_LABELS = frozenset(("", "json", "python", "tool_code", "tool_call"))
_JSON = re.compile(r'\{\s*"|\[\s*[{\]]')
_PYTHON = re.compile(r"\[?\s*[A-Za-z_][\w.]*\(")
_WORDS = {"true": True, "false": False, "null": None}  # JSON constants, accepted in Python syntax


class MalformedCall(CompassError, ValueError):
    """A text begins a call that cannot be parsed; the message gives the reason."""


class ToolCall(NamedTuple):
    """A tool call: the tool's name, the arguments by name, and positional arguments (Python syntax
    only). Values are JSON values.
    """

    name: str
    arguments: JsonMapping
    positional: tuple[Json, ...] = ()


def tool_calls(text: str) -> list[ToolCall]:
    """Returns the calls in a text, in their order, or an empty list.

    Text inside `<think>` contains no calls. Nor does prose around a `<tool_call>` or around a
    fenced block. Raises MalformedCall for a call that cannot be parsed, and for more than
    MOST_CALLS calls.
    """
    begin, end = call_span(text)
    body = text[begin:end].strip()
    blocks = fenced_blocks(body, _LABELS)
    if blocks and blocks[0].start() == 0 and body.endswith("```"):
        body = body[blocks[0].start(2) : -3].strip()  # an argument may have fences, too
    body = body.removeprefix("[TOOL_CALLS]").lstrip()
    reader = _reader(body) or (_parse_tagged if body.startswith(_OPEN) else None)
    if reader is None:
        return []
    if len(body) > MOST_CHARS:
        raise MalformedCall(f"{len(body):,} characters of calls, more than {MOST_CHARS:,}")
    calls = reader(body)
    if len(calls) > MOST_CALLS:
        raise MalformedCall(f"{len(calls):,} calls, more than {MOST_CALLS}")
    return calls


def call_span(text: str) -> tuple[int, int]:
    """Returns the (begin, end) offsets of the calls in a text, or of what may be calls."""
    begin, end = 0, len(text)
    if _reader(text.strip()):
        return begin, end
    if "</think>" in text:
        begin = text.rfind("</think>") + len("</think>")
    if (thought := text.find("<think>", begin)) >= 0:
        end = thought
    body = text[begin:end]
    if _reader(body.strip()):
        return begin, end
    if _OPEN in body:
        closed = body.rfind(_CLOSE)
        last = closed + len(_CLOSE) if closed > body.rfind(_OPEN) else len(body)
        return begin + body.find(_OPEN), begin + last
    blocks = fenced_blocks(body, _LABELS)
    return (begin + blocks[-1].start(), begin + blocks[-1].end()) if blocks else (begin, end)


def _reader(body: str) -> Callable[[str], list[ToolCall]] | None:
    """Returns the parser for a text that begins with a call; None if the text does not."""
    return (
        _parse_json_calls
        if _JSON.match(body)
        else _parse_python_calls
        if _PYTHON.match(body)
        else None
    )


def _parse_tagged(text: str) -> list[ToolCall]:
    """Returns the calls between tags. Tags inside the strings of a call are ignored."""
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder()
    start = text.find(_OPEN)
    while start >= 0 and len(calls) <= MOST_CALLS:
        begin = start + len(_OPEN)
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        try:
            _, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            raise MalformedCall(f"after {_OPEN}: not JSON: {error}") from error
        if not text[end:].lstrip().startswith(_CLOSE):
            raise MalformedCall(f"a {_OPEN} has no {_CLOSE} after its JSON")
        calls += _parse_json_calls(text[begin:end], must=True)
        start = text.find(_OPEN, end)
    return calls


def _parse_json_calls(text: str, must: bool = False) -> list[ToolCall]:
    """Returns a JSON text's calls; none for an object without a call's fields, unless `must`."""
    value = parse_json(text, "a call", error=MalformedCall)
    fields = {"name", "function", "tool_calls"}
    if isinstance(value, dict) and not must and not fields & value.keys():
        return []
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    return [of_object(one) for one in value] if isinstance(value, list) else [of_object(value)]


def of_object(value: Json) -> ToolCall:
    """Returns the call that a JSON value describes.

    The name is under "name" or "function". The arguments, an object or its JSON text, are under
    "arguments" or "parameters". OpenAI's format has both under "function". Raises MalformedCall for
    anything else.
    """
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping):
        raise MalformedCall(f"{value!r:.80} is no call: it must be an object with a name")
    name = value.get("name", value.get("function"))
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():
        arguments = parse_json(arguments, "a call's arguments", error=MalformedCall)
    if not isinstance(name, str) or not name:
        raise MalformedCall(f"{str(dict(value))[:80]} has no name of a tool")
    if not isinstance(arguments or {}, Mapping):
        raise MalformedCall(f"the arguments of {name:.40} are no object: {arguments!r:.80}")
    return ToolCall(name, dict(arguments or {}))


def _parse_python_calls(text: str) -> list[ToolCall]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes in strings
            statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedCall(f"not Python's syntax of calls: {error!s:.120}") from error
    nodes: list[ast.AST] = []
    for statement in statements:
        node = statement.value if isinstance(statement, ast.Expr) else statement
        nodes += node.elts if isinstance(node, ast.List) else [node]
    return [_parse_node(node, text) for node in nodes[: MOST_CALLS + 1]]


def _parse_node(node: ast.AST, text: str) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise MalformedCall(f"a {type(node).__name__} stands where a call should")
    parts: list[str] = []
    function: ast.expr = node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        raise MalformedCall("a call's name must be a name, or names with dots between them")
    name = ".".join([function.id, *reversed(parts)])
    arguments: JsonObject = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise MalformedCall(f"{name:.40} gets {keyword.arg or '**'} more than once")
        arguments[keyword.arg] = _literal(keyword.value, text)
    return ToolCall(name, arguments, tuple(_literal(one, text) for one in node.args))


class _Words(ast.NodeTransformer):
    """Replaces the constants of JSON by those of Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _literal(node: ast.expr, text: str) -> Json:
    """Returns the JSON value of an argument in `text`. Raises MalformedCall for other nodes."""
    keys = [key for one in ast.walk(node) if isinstance(one, ast.Dict) for key in one.keys]
    if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys):
        raise MalformedCall("the keys of an object must be strings")
    try:
        value = json.dumps(ast.literal_eval(_Words().visit(node)), allow_nan=False)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        source = ast.get_source_segment(text, node) or ""
        raise MalformedCall(f"an argument is no value of JSON: {source[:80]}") from error
    return parse_json(value, "an argument", error=MalformedCall)
