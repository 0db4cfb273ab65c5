"""Tool calls, and the parser of calls without marks of their own:

    [{"name": "f", "arguments": {"a": 1}}]                                 a JSON list, or an object
    {"tool_calls": [{"function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]}       OpenAI's fields
    [f(a=1), g(b='x')]                                                     Python's syntax

alone in a text, or in a fenced block. marked.py parses calls between marks. The text is untrusted:
it is parsed, never evaluated.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.base.errors import CompassError
from compass_jax.base.untrusted import fenced_blocks, parse_json

MOST_CHARS = 100_000  # maximum length of a text with calls
MOST_CALLS = 64
_LABELS = frozenset(("", "json", "python", "tool_code", "tool_call"))
_JSON = re.compile(r'\{\s*"|\[\s*[{\]]')
_PYTHON = re.compile(r"\[?\s*[A-Za-z_][\w.]*\(")
_NAMES = ("name", "function", "tool_name")
_WORDS = {"true": True, "false": False, "null": None}  # JSON constants, accepted in Python syntax


class MalformedCall(CompassError, ValueError):
    """A text begins a call that cannot be parsed; the message gives the reason."""


class ToolCall(NamedTuple):
    """A tool call: the tool's name, the arguments by name, and positional arguments (Python syntax
    only). Values are JSON values.

    Some forms write strings without quotes, so that 42 may be a number or a text. `texts` has the
    text of each such argument; its value in `arguments` is the JSON value that the text spells.
    """

    name: str
    arguments: JsonMapping
    positional: tuple[Json, ...] = ()
    texts: Mapping[str, str] = {}

    def with_texts(self, names: Container[str]) -> ToolCall:
        """Returns the call with the texts of those arguments as their values."""
        chosen = {name: text for name, text in self.texts.items() if name in names}
        return self._replace(arguments={**self.arguments, **chosen}, texts={}) if chosen else self

    def typed(self, schema: Json) -> ToolCall:
        """Returns the call with the texts of those arguments that a tool's JSON schema declares as
        strings.
        """
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not self.texts or not isinstance(properties, Mapping):
            return self
        types = {name: x.get("type") for name, x in properties.items() if isinstance(x, Mapping)}
        return self.with_texts([x for x, kind in types.items() if kind in ("string", ["string"])])


class BareCalls(NamedTuple):
    """The calls without marks in a content, and the (begin, end) offsets of their text."""

    calls: tuple[ToolCall, ...] = ()
    begin: int = 0
    end: int = 0
    malformed: str = ""  # why a text that begins as a call is none


def read_bare_calls(content: str) -> BareCalls:
    """Returns the calls of a content that is calls alone, or of its last fenced block."""
    begin, end = 0, len(content)
    body = content.strip()
    if _parser(body) is None:
        blocks = fenced_blocks(content, _LABELS)
        if not blocks:
            return BareCalls()
        begin, end = blocks[-1].span()
        body = blocks[-1][2].strip()
    if (parser := _parser(body)) is None:
        return BareCalls()
    try:
        check_size(len(body))
        calls = parser(body)
        check_count(len(calls))
    except MalformedCall as error:
        return BareCalls((), begin, end, str(error))
    return BareCalls(tuple(calls), begin, end)


def begins_bare_call(content: str) -> bool:
    """Returns whether a content begins as a call without marks does."""
    return _parser(content.lstrip()) is not None


def check_size(count: int) -> None:
    """Raises MalformedCall for a text of calls with more than MOST_CHARS characters."""
    if count > MOST_CHARS:
        raise MalformedCall(f"{count:,} characters of calls, more than {MOST_CHARS:,}")


def check_count(count: int) -> None:
    """Raises MalformedCall for more than MOST_CALLS calls."""
    if count > MOST_CALLS:
        raise MalformedCall(f"{count:,} calls, more than {MOST_CALLS}")


def _parser(body: str) -> Callable[[str], list[ToolCall]] | None:
    """Returns the parser for a text that begins with a call; None if the text does not."""
    if _JSON.match(body):
        return _parse_json_calls
    return _parse_python_calls if _PYTHON.match(body) else None


def _parse_json_calls(text: str) -> list[ToolCall]:
    """Returns a JSON text's calls; none for an object without a call's fields."""
    value = parse_json(text, "a call", error=MalformedCall)
    if isinstance(value, dict) and not {*_NAMES, "tool_calls"} & value.keys():
        return []
    return calls_in_json(value)


def calls_in_json(value: Json) -> list[ToolCall]:
    """Returns the calls that a JSON value describes: an object, a list of objects, or an object
    with them under "tool_calls". Raises MalformedCall for anything else.
    """
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    return [read_call(x) for x in value] if isinstance(value, list) else [read_call(value)]


def read_call(value: Json) -> ToolCall:
    """Returns the call that a JSON object describes.

    The name is under "name", "function" or "tool_name". The arguments, an object or its JSON text,
    are under "arguments" or "parameters". OpenAI's format has both under "function". Raises
    MalformedCall for anything else.
    """
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping):
        raise MalformedCall(f"{value!r:.80} is no call: it must be an object with a name")
    name = next((value[key] for key in _NAMES if key in value), None)
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():
        arguments = parse_json(arguments, "a call's arguments", error=MalformedCall)
    if not isinstance(name, str) or not name:
        raise MalformedCall(f"{str(dict(value))[:80]} has no name of a tool")
    if not isinstance(arguments or {}, Mapping):
        raise MalformedCall(f"the arguments of {name:.40} are no object: {arguments!r:.80}")
    return ToolCall(name, dict(arguments or {}))


def write_call(call: ToolCall) -> str:
    """Returns a call as models of Hermes's form write it."""
    text = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


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
    return ToolCall(name, arguments, tuple(_literal(x, text) for x in node.args))


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
