"""Validation of chat messages, questions, reference answers and labels in rows."""

from __future__ import annotations

import json
import math

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.base.untrusted import parse_json
from compass_jax.data.files import DataError
from compass_jax.data.message_text import messages_in
from compass_jax.rewards.tasks.rows import LABELS
from compass_jax.rewards.verifiers.values import without_nulls

Messages = list[JsonObject]
MOST_LABEL = 80  # maximum characters of a label
ROLES = ("system", "developer", "user", "assistant", "tool")
INSTRUCTIONS = ("system", "developer")  # roles of messages that are not part of the question
# optional fields of a message, passed to the chat template
TEXTS = ("name", "tool_call_id", "reasoning_content")
NOTHING: tuple[Json, ...] = (None, "", [], {})


def check_messages(messages: Json, where: str) -> Messages:
    """Returns chat messages in the form that chat templates take.

    A message has role and content (a text, or a list of text parts) and may have the fields TEXTS
    and tool_calls. Raises DataError, which names the message, for any other field (such as an
    image), because dropping it would change the message. Null and empty values are dropped.
    """
    if not isinstance(messages, list) or not messages:
        shape = "messages must be a non-empty list of {'role', 'content'}"
        raise DataError(f"{where}: {shape}, not {messages!r:.80}")
    return [_message(message, f"{where}: messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Json, where: str) -> JsonObject:
    message_fields = message if isinstance(message, dict) else {}
    fields = {key: value for key, value in message_fields.items() if value not in NOTHING}
    if extra_keys := [
        key for key in fields if key not in ("role", "content", "tool_calls", *TEXTS)
    ]:
        raise DataError(
            f"{where} has {', '.join(map(repr, extra_keys))[:200]}: role, content, tool_calls,"
            f" {', '.join(TEXTS)} are used; remove it, or write it into the content"
        )
    role, content = message_fields.get("role"), _content(message_fields.get("content"), where)
    if content is None and "tool_calls" in fields:
        content = ""
    if not isinstance(content, str):
        shape = "must be an object with 'role' and a string 'content'"
        raise DataError(f"{where} {shape}, not {message!r:.80}")
    if role not in ROLES:
        raise DataError(f"{where} has the role {role!r:.80}; known roles: {', '.join(ROLES)}")
    for name in TEXTS:
        if not isinstance(fields.get(name, ""), str):
            raise DataError(f"{where} has {name} = {fields[name]!r:.80}: it must be text")
    if "tool_calls" in fields:
        if role != "assistant":
            raise DataError(f"{where} has tool_calls: only the assistant calls tools")
        calls = check_tools(fields["tool_calls"], f"{where}, tool_calls")
        fields["tool_calls"] = without_nulls(calls)
    return {"role": role, "content": content} | {
        key: value for key, value in fields.items() if key not in ("role", "content")
    }


def _content(content: Json, where: str) -> Json:
    """Returns a list of text parts joined without a separator; any other content unchanged."""
    if not isinstance(content, list):
        return content
    texts = []
    for i, part in enumerate(content):
        fields = without_nulls(part) if isinstance(part, dict) else {}
        text = fields.pop("text", None)
        if fields != {"type": "text"} or not isinstance(text, str):
            raise DataError(
                f"{where} has a list of parts for content (images, files?), of which part {i} is"
                f" {part!r:.80}: a part must be {{'type': 'text', 'text': ...}}"
            )
        texts.append(text)
    return "".join(texts)


def check_tools(tools: Json, where: str) -> list[JsonObject]:
    """Returns tools, or calls of tools, as a list of objects; they may be its JSON text. Raises
    DataError for anything else.
    """
    if isinstance(tools, str) and tools.strip():
        tools = parse_json(tools, where, error=DataError)
    if tools in NOTHING:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: must be a list of objects, not {tools!r:.80}")
    return tools


def refuse_blank(messages: Messages, role: str, where: str, why: str, first: int = 0) -> None:
    """Raises DataError for a message of this role with neither text nor tool calls; `first` is the
    index of the first of the messages.
    """
    for i, message in enumerate(messages, first):
        blank = not message["content"].strip() and "tool_calls" not in message
        if message["role"] == role and blank:
            raise DataError(
                f"{where}: messages[{i}] of role {role!r} is empty: {why}; write it, or delete "
                "the row"
            )


def asked_of(prompt: Json, where: str) -> tuple[str, Messages]:
    """Returns (question, messages) of a row's prompt: a text, chat messages or their JSON text.

    The question of a conversation joins all its turns except the system's. Raises DataError, which
    names `where`, for a value that is not a prompt.
    """
    prompt = messages_in(prompt, where)
    if not isinstance(prompt, str | list):
        kind = type(prompt).__name__
        raise DataError(f"{where}: a {kind}; it must be text or a list of chat messages")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = check_messages(prompt, where)
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: ends with an assistant message; it must end with what is asked")
    if not any(message["role"] == "user" for message in messages):
        raise DataError(
            f"{where}: no message of role 'user': nothing is asked; add one or delete the row"
        )
    refuse_blank(messages, "user", where, "nothing is asked")
    turns = (message["content"] for message in messages if message["role"] not in INSTRUCTIONS)
    return "\n".join(turns), messages


def answer_of(answer: Json) -> str:
    """Returns the reference answer as text, for a custom verifier, which may read any form."""
    if isinstance(answer, str):
        return answer
    if type(answer) is int or (isinstance(answer, float) and math.isfinite(answer)):
        return str(answer)
    return json.dumps(answer, ensure_ascii=False, default=str)


def labels_of(row: JsonMapping) -> tuple[tuple[str, ...], JsonObject]:
    """Returns the labels in a row's columns, such as "domain/algebra", and the columns whose value
    is no label. The only entry of a list is the label.
    """
    labels, unusable = [], {}
    for name in LABELS:
        value = row.get(name)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value in NOTHING:
            continue
        if isinstance(value, str | int | float) and len(str(value)) <= MOST_LABEL:
            labels.append(f"{name}/{value}")
        else:
            unusable[name] = value
    return tuple(labels), unusable
