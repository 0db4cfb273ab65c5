"""Detection of a chat template's format (compass_jax/base/chat) from the text that it renders.

A turn with a thought, a content and calls is rendered, and every format reads it. The format that
reads most of it is the template's; of several, the one with the most own marks in the template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from compass_jax.base.aliases import JsonMapping, JsonObject
from compass_jax.base.chat.base import AUTO, ChatFormat, any_format, chat_formats
from compass_jax.config import DataConfig
from compass_jax.data.templates import TODAY, TemplateFailure, render_chat, strftime_of
from compass_jax.data.vocabulary import folder_templates, read_config, special_tokens

D = TypeVar("D", bound=DataConfig)
_QUESTION = {"role": "user", "content": "how is the weather?"}
_THOUGHT, _CONTENT = "a thought about it", "some words before"
_CITIES = ("Paris", "Rome")
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "returns the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "a city"}},
            "required": ["city"],
        },
    },
}


def detect(template: str, variables: JsonMapping) -> ChatFormat:
    """Returns the format of a chat template; any_format for one without marks that are known."""
    turns = list(_turns(template, variables))
    rendered_text = "\n".join([template, *(text for text, _ in turns)])

    def score(chat_format: ChatFormat) -> tuple[int, int]:
        points = sum(_points(chat_format, text, message) for text, message in turns)
        return points, sum(mark in rendered_text for mark in chat_format.own_marks)

    best = max(chat_formats().values(), key=score)
    return best if score(best)[1] else any_format()


def _turns(template: str, variables: JsonMapping) -> Iterator[tuple[str, JsonObject]]:
    """Yields the text of each probe that the template renders, with its message."""
    for message in _messages():
        tools = [_TOOL] if "tool_calls" in message else None
        try:
            before = render_chat(template, [_QUESTION], tools, True, variables)
            after = render_chat(template, [_QUESTION, message], tools, False, variables)
        except TemplateFailure:
            continue
        yield after[len(before) :] if after.startswith(before) else after, message


def _messages() -> Iterator[JsonObject]:
    calls = [
        {
            "type": "function",
            "id": f"call{n:05}",
            "function": {"name": "weather", "arguments": {"city": city}},
        }
        for n, city in enumerate(_CITIES)
    ]
    for count in (2, 1, 0):
        for thought in (_THOUGHT, ""):
            message: JsonObject = {"role": "assistant", "content": _CONTENT}
            if count:
                message["tool_calls"] = calls[:count]
            yield {**message, "reasoning_content": thought} if thought else message


def _points(chat_format: ChatFormat, text: str, message: JsonObject) -> int:
    """Returns how many parts of a rendered message a format reads."""
    read = chat_format.read(text)
    cities = [call.arguments.get("city") for call in read.calls]
    return sum(
        (
            read.thought.strip() == message.get("reasoning_content", ""),
            read.content.strip().startswith(_CONTENT),
            cities == list(_CITIES[: len(message.get("tool_calls", ()))]),
        )
    )


def _reads(chat_format: ChatFormat, text: str, message: JsonObject) -> bool:
    """Returns whether a format reads all that a template has written of a message. The words beside
    a call may be a thought there.
    """
    text = text.rstrip()
    for end in chat_format.ends:
        text = text.removesuffix(end)
    read, thought = chat_format.read(text), message.get("reasoning_content", "")
    cities = [call.arguments.get("city") for call in read.calls]
    return (
        (thought in read.thought or thought not in text)
        and (_CONTENT in read.thought + read.content or _CONTENT not in text)
        and cities == [x for x in _CITIES[: len(message.get("tool_calls", ()))] if x in text]
    )


def unread_turns(
    chat_format: ChatFormat, folder: str | Path, template_args: Mapping[str, object] | None = None
) -> list[str]:
    """Returns the turns, as the chat template of a folder writes them, whose thought, content or
    calls a format does not read back. Raises TokenizerError for a template that cannot be read.
    """
    template, variables = _template_of(folder, template_args, "")
    turns = _turns(template or "", variables)
    return [text for text, message in turns if not _reads(chat_format, text, message)]


def detected_in(
    folder: str | Path, template_args: JsonMapping | None = None, date: str = ""
) -> ChatFormat:
    """Returns the format of a folder's chat template. Raises TokenizerError for a template that
    cannot be read.
    """
    template, variables = _template_of(folder, template_args, date)
    return any_format() if template is None else detect(template, variables)


def _template_of(
    folder: str | Path, template_args: Mapping[str, object] | None, date: str
) -> tuple[str | None, dict[str, object]]:
    config = read_config(folder)
    templates = folder_templates(Path(folder), config.chat_template)
    variables: dict[str, object] = {
        **special_tokens(config),
        TODAY: strftime_of(date),
        **(template_args or {}),
    }
    return templates.get("tool_use", templates.get("default")), variables


def with_chat_format(data: D) -> D:
    """Returns the settings with the format that "auto" stands for, where a tokenizer is named."""
    if data.chat_format != AUTO or not (Path(data.tokenizer) / "tokenizer_config.json").is_file():
        return data
    detected = detected_in(data.tokenizer, dict(data.template_args), data.date)
    return replace(data, chat_format=detected.name)
