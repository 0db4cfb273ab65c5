"""Chat templates, rendered as transformers renders them.

The environment is that of transformers' `apply_chat_template`: sandboxed and immutable, blocks
trimmed, with loop controls, `tojson`, `raise_exception`, `strftime_now` and `{% generation %}`. The
variables `tools` and `documents` default to None.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import product
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from compass_jax.base.aliases import Json, JsonMapping
from compass_jax.base.errors import UserError

Message = JsonMapping
TODAY = "strftime_now"  # a template's function for the present date
_ID_LETTERS = 9  # Mistral's templates refuse ids of other lengths
_WORDS = 500  # maximum characters of an error's text


class TemplateFailure(UserError):
    """A chat template failed to render a conversation."""


class ToolsNotShown(TemplateFailure):
    """A template renders a conversation identically with and without its tools."""


class GenerationBlock(jinja2.ext.Extension):
    """The block `{% generation %}`, which marks the assistant's text, unchanged."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own name

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Parses the block to its content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> None:
    """Raises an error with a template's own message."""
    raise jinja2.exceptions.TemplateError(str(message))


def tojson(value: Json, ensure_ascii: bool = False, **options: Json) -> str:
    """Writes JSON without jinja2's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def strftime_of(date: str) -> Callable[[str], str]:
    """Returns a template's `strftime_now`, for a date as YYYY-MM-DD; empty: for now."""
    return lambda pattern: (datetime.fromisoformat(date) if date else datetime.now()).strftime(
        pattern
    )


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    """Compiles a template in the environment of transformers' chat templates."""
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    jinja.filters["tojson"] = tojson
    jinja.globals |= {"raise_exception": raise_exception, TODAY: strftime_of("")}
    return jinja.from_string(source)


def render(source: str, **variables: Any) -> str:
    """Renders a template. Raises TemplateFailure for every error in it."""
    try:
        return _compiled(source).render(**variables)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise TemplateFailure(f"{error.message} (line {error.lineno} of the template)") from error
    except Exception as error:
        raise TemplateFailure(f"{type(error).__name__}: {str(error)[:_WORDS]}") from error


def render_chat(
    source: str,
    messages: Sequence[Message],
    tools: Sequence[JsonMapping] | None,
    add_generation_prompt: bool,
    variables: JsonMapping,
) -> str:
    """Renders a conversation, in the first form of its tool calls that the template accepts.

    Templates expect calls in different forms (see `_call_forms`). Raises TemplateFailure with the
    template's error for the first form, or if the template omits a part of the messages.
    """

    def rendered(form: Sequence[Message], shown_tools: Json) -> str:
        return render(
            source,
            messages=list(form),
            tools=list(shown_tools) if shown_tools else None,
            **{"documents": None, **variables},
            add_generation_prompt=add_generation_prompt,
        )

    failure: TemplateFailure | None = None
    for form in _call_forms(_with_thinking(source, messages)):
        try:
            text = rendered(form, tools)
            if (field := _hidden_field(source, form, tools, text, rendered)) is None:
                return text
            kind = ToolsNotShown if field == "tools" else TemplateFailure
            failure = failure or kind(
                f"it does not show the {field} of these messages: use a model whose template does,"
                " or write them into the content"
            )
        except TemplateFailure as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _with_thinking(source: str, messages: Sequence[Message]) -> Sequence[Message]:
    """Adds `thinking` to messages with `reasoning_content`, for gpt-oss's template."""
    if not re.search(r"\bthinking\b", source):
        return messages
    return [
        {"thinking": message["reasoning_content"], **message}
        if message.get("reasoning_content")
        else message
        for message in messages
    ]


def _hidden_field(
    source: str, messages: Sequence[Message], tools: Json, text: str, rendered: Json
) -> str | None:
    """Returns a part of a conversation that the template omits, or None.

    A part is omitted if the text is the same without it. A template may omit the reasoning of
    earlier turns, but must mention the field. It may omit the name and id of a tool's answer,
    because the order of the messages implies them.
    """
    fields = {name for message in messages for name in message}
    reasoning = ("reasoning_content", "thinking")
    if "reasoning_content" in fields and not any(name in source for name in reasoning):
        return "reasoning_content"
    variants = {"tools": (messages, None)} if tools else {}
    for field in ("name", "tool_calls"):
        shorter = [
            {k: v for k, v in m.items() if k != field or m.get("role") == "tool"} for m in messages
        ]
        if shorter != list(messages):
            variants[field] = (shorter, tools)
    for field, (form, shown_tools) in variants.items():
        try:
            if rendered(form, shown_tools) == text:
                return field
        except TemplateFailure:
            continue  # the template reads the field
    return None


def _call_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yields the messages in each form of tool calls that templates read: arguments as an object
    or as JSON text, an empty or null content, OpenAI's fields, ids of nine letters.
    """
    plain = [_with_calls(x, lambda call: _map_arguments(call, _object)) for x in messages]
    yield plain
    if not any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
        return
    openai = [_with_calls(message, _as_openai) for message in plain]
    for new_ids, empty, as_text in product((False, True), ("", None), (False, True)):
        form = _with_ids(openai, new_ids)
        if as_text:
            form = [_with_calls(x, lambda call: _map_arguments(call, _text)) for x in form]
        yield [
            {**x, "content": x.get("content") or empty} if x.get("tool_calls") else x for x in form
        ]


def _with_calls(message: Message, change: Callable[[Json], Any]) -> Message:
    calls = [change(call) for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls} if calls else message


def _map_arguments(call: Json, change: Callable[[Json], Any]) -> Json:
    if not isinstance(call, Mapping):
        return call
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _map_arguments(function, change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def _object(arguments: Json) -> Json:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _text(arguments: Json) -> str:
    return arguments if isinstance(arguments, str) else tojson(arguments)


def _as_openai(call: Json) -> Json:
    """Returns a call as {"type": "function", "function": {"name", "arguments"}}."""
    if isinstance(call, Mapping) and not isinstance(call.get("function"), Mapping):
        return {"type": "function", "function": call}
    return {"type": "function", **call}


def call_id(text: str) -> str:
    """Returns an id of nine letters and digits that is a function of the text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()[:_ID_LETTERS]


def _with_ids(messages: Sequence[Message], replaced: bool) -> list[Message]:
    """Gives every call an id, and every tool's answer its call's; all new if `replaced`."""
    result: list[Message] = []
    open_ids: list[str] = []  # ids of calls that have no answer yet
    for number, message in enumerate(messages):
        if calls := list(message.get("tool_calls") or ()):
            calls = [
                {**call, "id": _id_of(call.get("id"), f"{number}.{n}", replaced)}
                for n, call in enumerate(calls)
            ]
            open_ids = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            default = open_ids.pop(0) if open_ids else call_id(str(number))
            identity = message.get("tool_call_id")
            message = {
                **message,
                "tool_call_id": _id_of(identity, "", replaced) if identity else default,
            }
        result.append(message)
    return result


def _id_of(identity: Json, place: str, replaced: bool) -> str:
    if identity and not replaced:
        return str(identity)
    return call_id(str(identity or place))
