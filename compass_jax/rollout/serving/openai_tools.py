"""Thoughts and tool calls in the answers of /v1/chat/completions."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from compass_jax.base.aliases import JsonMapping, JsonObject
from compass_jax.base.chat.base import ChatFormat, Message
from compass_jax.base.chat.calls import ToolCall
from compass_jax.base.chat.reader import CONTENT, NEW_THOUGHT, THOUGHT, Reader

_FENCE = "```"  # may begin a call anywhere in a content; the forms below only at its beginning
_MOST_BEGINNING = 1000  # characters of a content that may begin as a call
_MAY_BE_CALL = re.compile(r"\s*(?:[\[{]|[A-Za-z_][\w.]*(?:\(|\Z)|\Z)")


class Parts(NamedTuple):
    """New text of the thought and of the content, and calls in the format of OpenAI's API."""

    thought: str
    content: str
    calls: list[JsonObject]


def part_answer(message: Message, tools: Sequence[JsonMapping]) -> Parts:
    """Returns the parts of a complete answer.

    Between marks, a call may name any tool. In other forms it is a call only if `tools` contains
    its name, because an answer may itself be JSON or a program. A call that cannot be parsed
    remains in the text, and so does every call if there are no tools.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    calls = message.calls
    formatted = [_format_call(call, functions) for call in calls]
    known = bool(message.marked) or all(call.name in functions for call in calls)
    if not calls or not functions or None in formatted or not known:
        return Parts(message.thought, message.text, [])
    content, bare = message.content, message.bare
    if bare.calls:
        before, after = content[: bare.begin].rstrip(), content[bare.end :].strip()
        content = before + (f"\n{after}" if after else "")
    return Parts(message.thought, content, [call for call in formatted if call])


def _format_call(call: ToolCall, functions: JsonMapping) -> JsonObject | None:
    """Returns OpenAI's form of a call; None if positional arguments have no names."""
    parameters = functions.get(call.name, {}).get("parameters") or {}
    properties = parameters.get("properties")
    names = list(properties) if isinstance(properties, dict) else []
    positional = dict(zip(names, call.positional))
    if len(call.positional) > len(names) or positional.keys() & call.arguments.keys():
        return None
    arguments = {**positional, **call.typed(parameters).arguments}
    text = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": text}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class _Trimmed:
    """A text in pieces, of which blanks at the end are held back until more text follows."""

    def __init__(self, blanks: str | None):
        self._blanks = blanks
        self._held: list[str] = []
        self.sent = 0  # number of characters returned

    def push(self, text: str) -> str:
        """Returns the text that is certain not to be the end."""
        ready = text.rstrip(self._blanks)
        if not ready:
            self._held.append(text)
            return ""
        before, self._held = "".join(self._held), [text[len(ready) :]]
        self.sent += len(before) + len(ready)
        return before + ready

    def next_line(self, text: str) -> str:
        """Returns the text on a new line, after the text returned so far."""
        self._held = ["\n"]
        return self.push(text)

    @property
    def is_empty(self) -> bool:
        """Whether no text was pushed."""
        return not self.sent and not any(self._held)


class _WithoutCalls:
    """A content in pieces, without text from the first on that may be a call without marks."""

    def __init__(self) -> None:
        self._begin: str | None = ""  # the beginning, until it is known to be no call
        self._ticks = ""  # a possible beginning of a fence
        self._holds = False

    def push(self, text: str) -> str:
        """Returns the text that is part of no call."""
        if self._holds:
            return ""
        if self._begin is not None:
            self._begin += text
            match = _MAY_BE_CALL.match(self._begin)
            if match is not None and len(self._begin) <= _MOST_BEGINNING:
                self._holds = match[0][-1:] in ("[", "{", "(")
                return ""
            text, self._begin = self._begin, None
        text = self._ticks + text
        fence = text.find(_FENCE)
        if fence >= 0:
            self._holds = True
            return text[:fence]
        self._ticks = "`" * (len(text) - len(text.rstrip("`")))
        return text[: len(text) - len(self._ticks)]


class AnswerStream:
    """A stream of an answer's text, parted into thought, content and calls. Text that may be part
    of a call is held back until the end, since only the complete text shows whether it is one.

    Args:
        chat_format: the form of the answer.
        opened: the text with which the prompt's end opens a thought, or "".
        tools: the tools that the model may call.
    """

    def __init__(self, chat_format: ChatFormat, opened: str, tools: Sequence[JsonMapping]):
        self._format, self._tools = chat_format, tools
        self._reader = Reader(chat_format)
        self._text = [opened]
        self._thought, self._content = _Trimmed("\n"), _Trimmed(None)
        self._plain = _WithoutCalls()
        self._begins_thought = self._has_thought = bool(opened)
        self._reader.push(opened)

    def push(self, text: str, last: bool) -> tuple[Parts, Message | None]:
        """Returns the new parts that are certain; with `last`, all that remain and the Message."""
        self._text.append(text)
        if last:
            message = self._format.read("".join(self._text))
            thought, content, calls = part_answer(message, self._tools)
            sizes = self._thought.sent, self._content.sent
            return Parts(thought[sizes[0] :], content[sizes[1] :], calls), message
        thought, content = "", ""
        for segment in self._reader.push(text):
            if segment.kind == NEW_THOUGHT:
                self._begins_thought = self._has_thought = True
            elif segment.kind == THOUGHT:
                thought += self._push_thought(segment.text)
            elif segment.kind == CONTENT:
                content += self._push_content(segment.text)
        return Parts(thought, content, []), None

    def _push_thought(self, text: str) -> str:
        if self._begins_thought:
            text = text.lstrip("\n")
            self._begins_thought = not text
            if text and self._thought.sent:
                return self._thought.next_line(text)
        return self._thought.push(text)

    def _push_content(self, text: str) -> str:
        """Returns the content before a possible beginning of a call. White space before a call
        belongs to the call.
        """
        if self._has_thought and self._content.is_empty:
            text = text.lstrip("\r\n")
        return self._content.push(self._plain.push(text) if self._tools else text)
