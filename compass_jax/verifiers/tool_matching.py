"""Comparison of calls of tools with those of a reference, by value."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from compass_jax.tool_calls import ToolCall, of_object
from compass_jax.untrusted import parse_json
from compass_jax.verifiers.values import equal, without_nulls

_UNREAD = re.compile(r"[ ,./\-_*^]")


@dataclass(frozen=True)
class Tool:
    """The parameters of a tool in its description.

    Args:
        parameters: their names, in order.
        defaults: the values of omitted parameters, where the description has them.
    """

    parameters: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """A call of the reference.

    Args:
        name: the tool's.
        values: the permitted values of each argument.
        optional: the arguments that may be left out.
        loose: values are compared as in BFCL: an object among them has a list of permitted values
            for each key, with "" where the key may be missing, and strings are compared without
            case, blanks and punctuation.
    """

    name: str
    values: Mapping[str, Sequence[Any]]
    optional: frozenset[str] = frozenset()
    loose: bool = False

    def complaint(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the difference of a call to this one; empty: they are equal."""
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
            elif not any(_same(arguments[key], value, self.loose) for value in values):
                return f"{name}: {key} = {arguments[key]!r:.80} is not {_listed(values)}"
        return ""


class Verdict(NamedTuple):
    """The verdict on calls: `reward` is 1 where they are those of the reference, else 0; `name` and
    `arguments` are the shares of the reference's calls whose tool was called, and that were made
    with the right arguments; `reason` names the first difference.
    """

    reward: float
    name: float
    arguments: float
    reason: str


def compared(
    calls: Sequence[ToolCall],
    wanted: Sequence[Wanted],
    tools: Mapping[str, Tool],
    ordered: bool = False,
) -> Verdict:
    """Returns the verdict on calls; in any order unless `ordered`. `tools` may be empty: then no
    call has arguments by position, and no tool is unknown.
    """
    if not wanted:
        right = float(not calls)
        return Verdict(right, right, right, "a tool is called where none should be" * bool(calls))
    names = Counter(call.name for call in calls) & Counter(one.name for one in wanted)
    named = [by_name(call, tools.get(call.name, Tool())) for call in calls[: 2 * len(wanted)]]
    complaints = [
        [one.complaint(call.name, x) if isinstance(x, dict) else x for call, x in zip(calls, named)]
        for one in wanted
    ]
    partner = _partners(complaints, ordered)
    pairs = sum(other is not None for other in partner)
    reason = ""
    unknown = [call.name for call in calls if tools and call.name not in tools]
    if unknown:
        reason = f"there is no tool {unknown[0][:80]!r}"
    elif len(calls) != len(wanted):
        reason = f"{len(calls)} calls instead of {len(wanted)}"
    elif pairs < len(wanted):
        i = partner.index(None)
        free = [i] if ordered else [j for j in range(len(calls)) if j not in partner]
        reason = min((complaints[i][j] for j in free), key=_distance)
    right = float(not unknown and pairs == len(wanted) == len(calls))
    return Verdict(right, names.total() / len(wanted), pairs / len(wanted), reason[:400])


def by_name(call: ToolCall, tool: Tool) -> dict[str, Any] | str:
    """Returns the arguments of a call by name, or the fault of those by position."""
    names = tool.parameters[: len(call.positional)]
    if len(names) < len(call.positional):
        return f"{call.name[:80]} gets {len(call.positional)} arguments without a name"
    if twice := set(names) & set(call.arguments):
        return f"{call.name[:80]} gets {min(twice)} twice"
    return {**dict(zip(names, call.positional)), **call.arguments}


def tools_by_name(tools: Any) -> dict[str, Tool]:
    """Returns the tools that a row describes, as OpenAI or BFCL: a list of objects, or its JSON."""
    tools = parse_json(tools, "the row's tools") if isinstance(tools, str) and tools else tools
    described = {}
    for one in tools or ():
        one = one.get("function", one)
        schema = one.get("parameters") or {}
        properties = schema.get("properties") or {}
        defaults = {key: x["default"] for key, x in properties.items() if "default" in x}
        described[one["name"]] = Tool(tuple(properties), defaults)
    return described


def wanted_calls(reference: Any, tools: Mapping[str, Tool]) -> list[Wanted]:
    """Returns the calls of a reference: a list, or its JSON, of name and arguments, or of BFCL's
    {tool: {argument: [values that it may have]}}, where "" says that it may be left out. In the
    former an argument with its default, as the tool's description has it, may be left out or given.

    Raises ValueError or UserError for anything else: the row is wrong, not the answer.
    """
    if isinstance(reference, str):
        reference = parse_json(reference, "the reference")
    if not isinstance(reference, list | tuple):
        raise ValueError(f"the reference {reference!r:.80} must be a list of calls")
    calls = [_wanted(one, tools) for one in reference]
    for name in (call.name for call in calls if tools and call.name not in tools):
        raise ValueError(f"the reference calls {name!r:.80}, and the row describes no such tool")
    return calls


def _wanted(one: Any, tools: Mapping[str, Tool]) -> Wanted:
    if isinstance(one, Mapping) and len(one) == 1:
        ((name, arguments),) = one.items()
        if isinstance(arguments, Mapping) and name != "function":
            return Wanted(
                name,
                {key: _alternatives(values) for key, values in arguments.items()},
                frozenset(key for key, values in arguments.items() if "" in values or not values),
                loose=True,
            )
    call = of_object(one)
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


def _alternatives(values: Sequence[Any]) -> list[Any]:
    """Returns the values without the mark of an optional argument, unless the argument is a text.
    No value at all means the empty list in BFCL.
    """
    if not values:
        return [[]]
    marked = [value for value in values if value != ""]
    texts = not marked or any(isinstance(value, str) for value in marked)
    return list(values) if texts else marked


def _plain(text: str) -> str:
    return _UNREAD.sub("", text).casefold().replace("'", '"')


def _same(value: Any, wanted: Any, loose: bool) -> bool:
    if not loose:
        return equal(value, wanted)
    if isinstance(wanted, Mapping):
        return (
            isinstance(value, Mapping)
            and value.keys() <= wanted.keys()
            and all(key in value or "" in values for key, values in wanted.items())
            and all(any(equal(value[key], x, _plain) for x in wanted[key]) for key in value)
        )
    if isinstance(wanted, list | tuple) and isinstance(value, list | tuple):
        return len(value) == len(wanted) and all(_same(x, y, True) for x, y in zip(value, wanted))
    return equal(value, wanted, _plain)


def _partners(complaints: Sequence[Sequence[str]], ordered: bool) -> list[int | None]:
    """Returns the call that each wanted one is paired with, in the same place where `ordered`, else
    in a largest matching (Kuhn's augmenting paths).
    """
    if ordered:
        return [i if i < len(row) and not row[i] else None for i, row in enumerate(complaints)]
    owner: dict[int, int] = {}

    def placed(i: int, seen: set[int]) -> bool:
        for j, complaint in enumerate(complaints[i]):
            if not complaint and j not in seen:
                seen.add(j)
                if j not in owner or placed(owner[j], seen):
                    owner[j] = i
                    return True
        return False

    for i in range(len(complaints)):
        placed(i, set())
    partners = {i: j for j, i in owner.items()}
    return [partners.get(i) for i in range(len(complaints))]


def _distance(complaint: str) -> int:
    """Returns the rank of a complaint: that of the most similar call first."""
    return 2 if " is called, not " in complaint else int(" lacks " in complaint)


def _listed(values: Sequence[Any]) -> str:
    shown = [f"{value!r:.60}" for value in values[:3]]
    return " or ".join(shown) + (" or another" if len(values) > 3 else "")
