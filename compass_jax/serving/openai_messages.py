"""The messages of /v1/chat/completions, checked: what a chat template may be given.

A message has a role and a content; beside them what a template can show, `name`, `tool_calls` and
`tool_call_id`. A template that does not show one of the first two refuses the conversation
(`Tokenizer.encode_chats`), so that nothing which a client wrote is dropped.
"""

from __future__ import annotations

from typing import Any

from compass_jax.serving.errors import BadRequest, shown
from compass_jax.untrusted import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
# What clients send back with an answer of this server; it must be empty.
_EMPTY = frozenset({"refusal", "function_call", "annotations", "audio"})


def read_messages(messages: Any, most: int) -> list[dict[str, Any]]:
    """The messages, contents as texts, at most `most` of them. BadRequest naming the first that
    is none, and its field.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of {role, content}, and not empty", "messages")
    if len(messages) > most:
        text = f"{len(messages)} messages cannot fit into the {most} tokens that this server takes"
        raise BadRequest(text, "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def characters(value: Any) -> int:
    """Characters of all texts in a value of JSON, the names of fields left out."""
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value
    return sum(map(characters, parts)) if isinstance(value, dict | list) else 0


def _refused(where: str, value: Any, text: str) -> BadRequest:
    return BadRequest(f"{where} = {shown(value)}: {text}", "messages")


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _refused(where, message, "must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _refused(f"{where}.role", role, f"must be one of {', '.join(ROLES)}")
    found: dict[str, Any] = {"role": role}
    for name, value in message.items():
        if name in ("role", "content"):
            continue
        if name == "name" or (name == "tool_call_id" and role == "tool"):
            if value is not None:
                found[name] = _text(value, f"{where}.{name}")
        elif name == "tool_calls" and value is not None and value != []:
            if role != "assistant":
                raise BadRequest(f"{where}.tool_calls: only an assistant calls tools", "messages")
            found[name] = _tool_calls(value, f"{where}.tool_calls")
        elif (name not in _EMPTY and name != "tool_calls") or (value is not None and value != []):
            raise BadRequest(f"{where}.{name[:80]} is not supported; leave it out", "messages")
    content = message.get("content")
    called = "tool_calls" in found and content is None
    return {**found, "content": "" if called else _content(content, f"{where}.content")}


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _refused(where, value, "must be a text, and not empty")
    return value


def _content(content: Any, where: str) -> str:
    """A content as one text: its parts follow each other with nothing between them, since a server
    that put a line between them would say what the client did not.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _refused(where, content, "must be a text, or a list of parts that is not empty")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            text = "this model reads text alone; a part must be {type: text, text}"
            raise _refused(f"{where}[{i}].type", kind, text)
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise BadRequest(f"{where}[{i}] must have type and text, a text, alone", "messages")
    return "".join(part["text"] for part in content)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The calls as chat templates read them: the arguments as an object. OpenAI's clients send
    them as its JSON.
    """
    if not isinstance(calls, list):
        raise _refused(where, calls, "must be a list of calls")
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    whole = set(call) == {"id", "type", "function"} and call["type"] == "function"
    if not (whole and isinstance(function, dict) and set(function) == {"name", "arguments"}):
        text = "must be {id, type: function, function: {name, arguments}}"
        raise _refused(where, call, text)
    given = function["arguments"]
    given = "{}" if given == "" else _text(given, f"{where}.function.arguments")
    try:
        arguments = parse_json(given, f"{where}.function.arguments", error=BadRequest)
    except BadRequest as error:
        raise BadRequest(str(error), "messages") from error
    if not isinstance(arguments, dict):
        raise _refused(f"{where}.function.arguments", given, "must be the JSON of an object")
    called = {"name": _text(function["name"], f"{where}.function.name"), "arguments": arguments}
    return {"id": _text(call["id"], f"{where}.id"), "type": "function", "function": called}
