"""Functions as tools: their JSON schemas for a prompt, and the answers to a model's calls.

    def weather(city: str, days: int = 1) -> dict:
        '''Returns the forecast of a city.

        Args:
            city: the city's name.
        '''

    tools = Tools(weather)
    row = {"prompt": "How is it in Paris?", "tools": tools.schemas}
    replies = tools.answer(chat_format.read(text))         a message of the role tool for each call

Every fault of a call is a message for the model, never an exception: a call that cannot be read, an
unknown tool, wrong arguments, an exception of the function. The functions run in this process, with
arguments that the model chose.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.base.chat.base import Message
from compass_jax.base.chat.calls import ToolCall
from compass_jax.base.errors import UserError

MOST_CHARS = 16_384  # maximum length of a tool's answer
_ARGUMENT = re.compile(r"\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_SECTION = re.compile(r"\s*[A-Z]\w+:\s*")


class ToolError(UserError):
    """A function that cannot be a tool. The message gives the reason and the remedy."""


class Tool:
    """A function with its schema. Raises ToolError for a function without type hints."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self._fields = _fields(self.name, function)
        summary, _ = _described(function)
        self._model = _model(self.name, function, self._fields)
        parameters = _without_titles(self._model.model_json_schema(by_alias=True))
        about = {"name": self.name, "description": summary, "parameters": parameters}
        self.schema: JsonObject = {"type": "function", "function": about}

    def run(self, call: ToolCall) -> str:
        """Returns the function's result as text, or {"error": ...}."""
        if len(call.positional) > len(self._fields):
            return error_text(f"{self.name} takes {len(self._fields)} arguments")
        by_position = dict(zip(self._fields, call.positional))
        if twice := by_position.keys() & call.arguments.keys():
            return error_text(f"{self.name} gets {min(twice)} twice")
        arguments = call.typed(self.schema["function"]["parameters"]).arguments
        return self.called({**by_position, **arguments})

    def called(self, arguments: JsonObject) -> str:
        """Returns the function's result as text, or that of a fault."""
        try:
            values = self._model.model_validate(arguments)
        except ValidationError as error:
            return error_text(f"{self.name}: {_first_problem(error)}")
        passed = [name for name in self._fields if f"field_{name}" in values.model_fields_set]
        try:
            return answer_text(
                self.function(**{name: getattr(values, f"field_{name}") for name in passed})
            )
        except Exception as error:
            return error_text(f"{self.name}: {type(error).__name__}: {error}"[:1000])


class Tools:
    """Functions that a model may call. Raises ToolError for two of one name."""

    def __init__(self, *functions: Callable[..., Any]):
        self._tools: dict[str, Tool] = {}
        for tool in map(Tool, functions):
            if tool.name in self._tools:
                raise ToolError(f"two tools are called {tool.name!r}: rename a function")
            self._tools[tool.name] = tool

    @property
    def schemas(self) -> list[JsonObject]:
        """The tools in OpenAI's format, as a row's `tools` and chat templates take them."""
        return [tool.schema for tool in self._tools.values()]

    def run(self, call: ToolCall) -> str:
        """Returns the answer to a call as text; the text of a fault is {"error": ...}."""
        if (tool := self._tools.get(call.name)) is None:
            return error_text(
                f"there is no tool {call.name[:80]!r}; there is {', '.join(self._tools)}"
            )
        return tool.run(call)

    def answer(self, message: Message) -> list[dict[str, str]]:
        """Returns the messages that answer the calls of a turn, in their order."""
        if message.malformed:
            return [{"role": "tool", "content": error_text(f"no call: {message.malformed}"[:1000])}]
        return [
            {"role": "tool", "name": call.name, "content": self.run(call)} for call in message.calls
        ]


def _fields(name: str, function: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's parameters. Raises ToolError for those without a name."""
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolError(f"{name}: the parameter {parameter} has no name for a call; name each")
        if parameter.annotation is parameter.empty:
            raise ToolError(f"{name}: the parameter {parameter.name} has no type hint; add one")
    return [parameter.name for parameter in parameters]


def _model(name: str, function: Callable[..., Any], fields: list[str]) -> type[BaseModel]:
    """Returns the model of a function's arguments; its fields have prefixes, because a
    parameter may be named like an attribute of every pydantic model.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ToolError(f"{name}: a type hint cannot be read: {error}") from error
    parameters, (_, about) = inspect.signature(function).parameters, _described(function)
    definitions: dict[str, Any] = {}
    for field in fields:
        default = parameters[field].default
        absent = ... if default is inspect.Parameter.empty else default
        description = about.get(field)
        definitions[f"field_{field}"] = (
            hints[field],
            Field(absent, alias=field, description=description),
        )
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **definitions)
    except Exception as error:  # pydantic's errors of a type have several classes
        raise ToolError(f"{name}: no schema for its type hints: {error}") from error


def _described(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Returns the first paragraph of a docstring, and the descriptions in its section Args."""
    lines = (inspect.getdoc(function) or "").splitlines()
    summary = " ".join(" ".join(lines).split()) if "" not in lines else ""
    summary = summary or " ".join(" ".join(lines[: lines.index("")] if lines else ()).split())
    about: dict[str, str] = {}
    inside, name = False, ""
    for line in lines:
        if _SECTION.fullmatch(line):
            inside, name = line.strip() in ("Args:", "Arguments:", "Parameters:"), ""
        elif line[:1].strip():  # text outside of the sections
            inside = False
        elif inside and (match := _ARGUMENT.fullmatch(line)):
            name = match[1]
            about[name] = match[2].strip()
        elif inside and name and line.strip():
            about[name] += f" {line.strip()}"
    return summary, about


def _without_titles(schema: Json, within: str = "") -> Json:
    """Returns a schema without pydantic's titles, which repeat the names."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    named = within in ("properties", "$defs")  # "title" may be the name of an argument there
    return {
        key: _without_titles(value, "" if named else key)
        for key, value in schema.items()
        if named or key != "title" or not isinstance(value, str)
    }


def _first_problem(error: ValidationError) -> str:
    problem: JsonMapping = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"it takes no {place[:80]}"
    return f"{place[:80]}: {problem['msg']}"


def answer_text(value: Any) -> str:
    """Returns a result as text of bounded length."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    more = len(text) - MOST_CHARS
    return text if more <= 0 else f"{text[:MOST_CHARS]}... ({more:,} more characters)"


def error_text(reason: str) -> str:
    """Returns the text of a fault, for the model."""
    return json.dumps({"error": reason}, ensure_ascii=False)
