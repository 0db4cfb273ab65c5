"""Tool calls, compared by value with those of a reference."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.base.chat.base import AUTO, Message
from compass_jax.base.chat.calls import ToolCall, read_call
from compass_jax.base.untrusted import parse_json
from compass_jax.config.chat import find_format
from compass_jax.config.kinds import Example, Form, Kind, complaints, one_of
from compass_jax.rewards.verifiers.extract import tagged_text
from compass_jax.rewards.verifiers.values import equal, without_nulls

_NO_CALL = "no tool is called"
_PROSE = re.compile(r"""([A-Za-z_][\w.]*)\([^()\n'"=]*\)[ \t]*(?:=(?!=)|[A-Za-z])""")  # f(x) = 2x
_UNREAD = re.compile(r"[ ,./\-_*^]")


@dataclass(frozen=True)
class Tool:
    """The parameters in a tool's description, in order, and their default values."""

    parameters: tuple[str, ...] = ()
    defaults: JsonMapping = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """A call of the reference, with the permitted values of each argument.

    `loose` values are compared as in BFCL: an object among them has a list of permitted values per
    key, with "" if the key may be missing; strings are compared without case, blanks and
    punctuation.
    """

    name: str
    values: Mapping[str, Sequence[Json]]
    optional: frozenset[str] = frozenset()  # arguments that may be omitted
    loose: bool = False

    def complaint(self, name: str, arguments: JsonMapping) -> str:
        """Returns the difference of a call from this one; empty if they are equal."""
        if not self.loose:
            arguments = without_nulls(arguments)
        if name != self.name:
            return f"{name[:80]} is called, not {self.name}"
        for key in arguments:
            if key not in self.values:
                return f"{name} takes no {key[:80]} here"
        for key, values in self.values.items():
            if key not in arguments:
                if key not in self.optional:
                    return f"{name} lacks {key}"
            elif not any(_matches(arguments[key], value, self.loose) for value in values):
                return f"{name}: {key} = {arguments[key]!r:.80} is not {_format_values(values)}"
        return ""


class Verdict(NamedTuple):
    """The verdict on calls.

    `reward` is 1 if they equal the reference's calls, else 0. `name` is the share of the
    reference's calls whose tool was called, `arguments` the share that was called with the right
    arguments. `reason` is the first difference.
    """

    reward: float
    name: float
    arguments: float
    reason: str


def compared(
    calls: Sequence[ToolCall],
    expected: Sequence[Wanted],
    tools: Mapping[str, Tool],
    ordered: bool = False,
) -> Verdict:
    """Returns the verdict on calls; their order is ignored unless `ordered`. If `tools` is empty,
    calls cannot have positional arguments, and every tool is known.
    """
    if not expected:
        right = float(not calls)
        return Verdict(right, right, right, "a tool is called where none should be" * bool(calls))
    names = Counter(call.name for call in calls) & Counter(one.name for one in expected)
    few = calls[: 2 * len(expected)]
    complaints = [[_complaint(entry, call, tools) for call in few] for entry in expected]
    partner = _partners(complaints, ordered)
    pairs = sum(other is not None for other in partner)
    reason = ""
    absent_tools = [call.name for call in calls if tools and call.name not in tools]
    if absent_tools:
        reason = f"there is no tool {absent_tools[0][:80]!r}"
    elif len(calls) != len(expected):
        reason = f"{len(calls)} calls instead of {len(expected)}"
    elif pairs < len(expected):
        i = partner.index(None)
        unpaired = [i] if ordered else [j for j in range(len(calls)) if j not in partner]
        reason = min((complaints[i][j] for j in unpaired), key=_distance)
    right = float(not absent_tools and pairs == len(expected) == len(calls))
    return Verdict(right, names.total() / len(expected), pairs / len(expected), reason[:400])


def _complaint(expected_call: Wanted, call: ToolCall, tools: Mapping[str, Tool]) -> str:
    """Returns the difference of a call from a wanted one. An argument without quotes is a text
    where the reference is one.
    """
    permitted = expected_call.values.items()
    texts = [key for key, values in permitted if any(isinstance(x, str) for x in values)]
    named = by_name(call.with_texts(texts), tools.get(call.name, Tool()))
    return expected_call.complaint(call.name, named) if isinstance(named, dict) else named


def by_name(call: ToolCall, tool: Tool) -> JsonObject | str:
    """Returns the arguments of a call by name, or the fault of its positional arguments."""
    names = tool.parameters[: len(call.positional)]
    if len(names) < len(call.positional):
        return f"{call.name[:80]} gets {len(call.positional)} arguments without a name"
    if twice := set(names) & set(call.arguments):
        return f"{call.name[:80]} gets {min(twice)} twice"
    return {**dict(zip(names, call.positional)), **call.arguments}


def tools_by_name(tools: Json) -> dict[str, Tool]:
    """Returns the tools that a row describes in the format of OpenAI or BFCL: a list of objects, or
    its JSON.
    """
    tools = parse_json(tools, "the row's tools") if isinstance(tools, str) and tools else tools
    described = {}
    for one in tools or ():
        one = one.get("function", one)
        schema = one.get("parameters") or {}
        properties = schema.get("properties") or {}
        defaults = {key: x["default"] for key, x in properties.items() if "default" in x}
        described[one["name"]] = Tool(tuple(properties), defaults)
    return described


def wanted_calls(reference: Json, tools: Mapping[str, Tool]) -> list[Wanted]:
    """Returns the calls of a reference, which is a list or its JSON.

    An entry has a name and arguments, or is BFCL's {tool: {argument: [permitted values]}}, in which
    "" marks an optional argument. In the first form, an argument that equals its default in the
    tool's description may be omitted, and defaults may be given.

    Raises ValueError or UserError for anything else: the row is wrong, not the answer.
    """
    if isinstance(reference, str):
        reference = parse_json(reference, "the reference")
    if not isinstance(reference, list | tuple):
        raise ValueError(f"the reference {reference!r:.80} must be a list of calls")
    calls = [_read_wanted(one, tools) for one in reference]
    for name in (call.name for call in calls if tools and call.name not in tools):
        raise ValueError(f"the reference calls {name!r:.80}, and the row describes no such tool")
    return calls


def _read_wanted(one: Json, tools: Mapping[str, Tool]) -> Wanted:
    if isinstance(one, Mapping) and len(one) == 1:
        ((name, arguments),) = one.items()
        if isinstance(arguments, Mapping) and name != "function":
            return Wanted(
                name,
                {key: _alternatives(values) for key, values in arguments.items()},
                frozenset(key for key, values in arguments.items() if "" in values or not values),
                loose=True,
            )
    call = read_call(one)
    call = call._replace(arguments=without_nulls(call.arguments))
    defaults = tools.get(call.name, Tool()).defaults
    left_out = {
        key: [without_nulls(value)] for key, value in defaults.items() if key not in call.arguments
    }
    as_default = {
        key
        for key, value in call.arguments.items()
        if key in defaults and equal(value, defaults[key])
    }
    values = {key: [value] for key, value in call.arguments.items()} | left_out
    return Wanted(call.name, values, frozenset(as_default | left_out.keys()))


def _alternatives(values: Sequence[Json]) -> list[Json]:
    """Returns the permitted values without the mark of an optional argument, unless the argument is
    a text. In BFCL, no values mean the empty list.
    """
    if not values:
        return [[]]
    marked = [value for value in values if value != ""]
    texts = not marked or any(isinstance(value, str) for value in marked)
    return list(values) if texts else marked


def _plain(text: str) -> str:
    return _UNREAD.sub("", text).casefold().replace("'", '"')


def _matches(value: Json, expected: Json, loose: bool) -> bool:
    if not loose:
        return equal(value, expected)
    if isinstance(expected, Mapping):
        return (
            isinstance(value, Mapping)
            and value.keys() <= expected.keys()
            and all(key in value or "" in values for key, values in expected.items())
            and all(any(equal(value[key], x, _plain) for x in expected[key]) for key in value)
        )
    if isinstance(expected, list | tuple) and isinstance(value, list | tuple):
        return len(value) == len(expected) and all(
            _matches(x, y, True) for x, y in zip(value, expected)
        )
    return equal(value, expected, _plain)


def _partners(complaints: Sequence[Sequence[str]], ordered: bool) -> list[int | None]:
    """Returns the index of the call paired with each wanted call, or None. With `ordered`, calls
    are paired by position; otherwise by a maximum matching (Kuhn's augmenting paths).
    """
    if ordered:
        return [i if i < len(row) and not row[i] else None for i, row in enumerate(complaints)]
    owner: dict[int, int] = {}

    def assign(i: int, visited: set[int]) -> bool:
        for j, complaint in enumerate(complaints[i]):
            if not complaint and j not in visited:
                visited.add(j)
                if j not in owner or assign(owner[j], visited):
                    owner[j] = i
                    return True
        return False

    for i in range(len(complaints)):
        assign(i, set())
    partners = {i: j for j, i in owner.items()}
    return [partners.get(i) for i in range(len(complaints))]


def _distance(complaint: str) -> int:
    """Returns the rank of a complaint; the most similar call has the lowest."""
    return 2 if " is called, not " in complaint else int(" lacks " in complaint)


def _format_values(values: Sequence[Json]) -> str:
    texts = [f"{value!r:.60}" for value in values[:3]]
    return " or ".join(texts) + (" or another" if len(values) > 3 else "")


def judge(
    response: str,
    answer: Json,
    answer_tag: str,
    tools: Json = (),
    ordered: bool = False,
    chat_format: str = AUTO,
) -> JsonMapping:
    """Returns 1 if the calls in the response are those of the reference. The components are those
    of a Verdict.
    """
    result = verdict(response, answer, answer_tag, tools, ordered, chat_format)
    parts = {"reward": result.reward, "name": result.name, "arguments": result.arguments}
    return parts if result.reason != _NO_CALL else {**parts, "extracted": False}


def verdict(
    response: str,
    answer: Json,
    answer_tag: str,
    tools: Json = (),
    ordered: bool = False,
    chat_format: str = AUTO,
) -> Verdict:
    """Returns the verdict of `judge`, with its reason."""
    described = tools_by_name(tools)
    expected = wanted_calls(answer, described)
    reader = find_format(chat_format)
    message = reader.read(response)
    inner = tagged_text(message.text, answer_tag) if answer_tag else None
    if inner is not None:
        message = reader.read(inner)
    if message.malformed and (expected or not _is_prose(message, described)):
        return Verdict(0.0, 0.0, 0.0, message.malformed)
    if expected and not message.calls:
        return Verdict(0.0, 0.0, 0.0, _NO_CALL)
    return compared(message.calls, expected, described, ordered)


def _is_prose(message: Message, tools: Mapping[str, Tool]) -> bool:
    """Returns whether a text without readable calls begins with prose about a function, which is a
    definition or about no described tool.
    """
    text = message.text
    prose = _PROSE.match(text.strip())
    if prose is None or message.fault or "```" in text:
        return False
    calls = any(re.search(rf"(?<![\w.]){re.escape(name)}\s*\(", text) for name in tools)
    return not calls and (bool(tools) or prose[0].endswith("="))


def why(
    response: str,
    answer: Json,
    answer_tag: str,
    tools: Json = (),
    ordered: bool = False,
    chat_format: str = AUTO,
) -> str:
    """Returns the reason for the verdict on the calls in the response."""
    return verdict(response, answer, answer_tag, tools, ordered, chat_format).reason


KIND = Kind(
    judge,
    "the tools are called that the reference calls, with its arguments by value",
    Example(
        {"answer": [{"name": "weather", "arguments": {"city": "Paris", "days": 2}}]},
        '<tool_call>{"name": "weather", "arguments": {"days": 2.0, "city": "Paris"}}</tool_call>',
        "[weather(city='Paris', days='2')]",
    ),
    takes=("tools", "ordered"),
    form=Form(
        r"tool_call|\btools?\b|\bfunctions?\b",
        'Call a tool as <tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>.',
    ),
    looks_for="calls: in the model's own form, in <tool_call>, as JSON, or in Python's syntax",
    complaint=complaints(ordered=one_of(True, False)),
    why=why,
)
