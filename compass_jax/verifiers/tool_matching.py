"""Whether calls of tools are those of a reference, by value."""

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
    """What a description says of a tool's parameters.

    Args:
        parameters: their names, in order.
        defaults: what those are that a call leaves out, where the description says it.
    """

    parameters: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """A call of the reference.

    Args:
        name: the tool's.
        values: what each argument may be, one or several values.
        optional: the arguments that may be left out.
        loose: values are compared as BFCL does: an object among them has a list of what each of its
            keys may be, with "" where the key may be missing, and strings are compared without
            case, blanks and punctuation.
    """

    name: str
    values: Mapping[str, Sequence[Any]]
    optional: frozenset[str] = frozenset()
    loose: bool = False

    def complaint(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What makes a call another one than this; empty: nothing."""
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
    """What calls are worth: `reward` is 1 where they are the wanted ones and else 0; `name` and
    `arguments` are the shares of the wanted calls whose tool was called, and that were made as
    wanted; `reason` says what is wrong.
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
    """The verdict on calls; in any order unless `ordered`. `tools` may be empty: then no call has
    arguments by position, and no tool is unknown.
    """
    if not wanted:
        right = float(not calls)
        return Verdict(right, right, right, "a tool is called where none should be" * bool(calls))
    names = Counter(call.name for call in calls) & Counter(one.name for one in wanted)
    given = [by_name(call, tools.get(call.name, Tool())) for call in calls[: 2 * len(wanted)]]
    told = [
        [one.complaint(call.name, x) if isinstance(x, dict) else x for call, x in zip(calls, given)]
        for one in wanted
    ]
    partner = _partners(told, ordered)
    found = sum(other is not None for other in partner)
    reason = ""
    unknown = [call.name for call in calls if tools and call.name not in tools]
    if unknown:
        reason = f"there is no tool {unknown[0][:80]!r}"
    elif len(calls) != len(wanted):
        reason = f"{len(calls)} calls instead of {len(wanted)}"
    elif found < len(wanted):
        i = partner.index(None)
        free = [i] if ordered else [j for j in range(len(calls)) if j not in partner]
        reason = min((told[i][j] for j in free), key=_distance)
    right = float(not unknown and found == len(wanted) == len(calls))
    return Verdict(right, names.total() / len(wanted), found / len(wanted), reason[:400])


def by_name(call: ToolCall, tool: Tool) -> dict[str, Any] | str:
    """The arguments of a call by name, or what is wrong with those that have none."""
    names = tool.parameters[: len(call.positional)]
    if len(names) < len(call.positional):
        return f"{call.name[:80]} gets {len(call.positional)} arguments without a name"
    if twice := set(names) & set(call.arguments):
        return f"{call.name[:80]} gets {min(twice)} twice"
    return {**dict(zip(names, call.positional)), **call.arguments}


def tools_by_name(tools: Any) -> dict[str, Tool]:
    """The tools that a row describes, as OpenAI or BFCL do: a list of objects, or its JSON."""
    tools = parse_json(tools, "the row's tools") if isinstance(tools, str) and tools else tools
    found = {}
    for one in tools or ():
        one = one.get("function", one)
        schema = one.get("parameters") or {}
        properties = schema.get("properties") or {}
        found[one["name"]] = Tool(
            tuple(properties),
            {key: said["default"] for key, said in properties.items() if "default" in said},
        )
    return found


def wanted_calls(reference: Any, tools: Mapping[str, Tool]) -> list[Wanted]:
    """The calls of a reference: a list, or its JSON, of calls with name and arguments, or of BFCL's
    {tool: {argument: [values that it may have]}}, where "" says that it may be left out. In the
    former an argument with its default, as the tool's description has it, may be left out or given.

    Raises ValueError or UserError for anything else: the row is wrong, not the answer.
    """
    if isinstance(reference, str):
        reference = parse_json(reference, "the reference")
    if not isinstance(reference, list | tuple):
        raise ValueError(f"the reference {reference!r:.80} must be a list of calls")
    found = [_wanted(one, tools) for one in reference]
    for name in (one.name for one in found if tools and one.name not in tools):
        raise ValueError(f"the reference calls {name!r:.80}, and the row describes no such tool")
    return found


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
    """Without the mark of an argument that may be left out, unless the argument is a text. Where
    BFCL lists no value at all, it means the empty list.
    """
    if not values:
        return [[]]
    said = [value for value in values if value != ""]
    texts = not said or any(isinstance(value, str) for value in said)
    return list(values) if texts else said


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


def _partners(told: Sequence[Sequence[str]], ordered: bool) -> list[int | None]:
    """The call that each wanted one is paired with, no call with two: those in its place where
    `ordered`, else as many as can be (Kuhn's augmenting paths).
    """
    if ordered:
        return [i if i < len(row) and not row[i] else None for i, row in enumerate(told)]
    owner: dict[int, int] = {}

    def placed(i: int, seen: set[int]) -> bool:
        for j, complaint in enumerate(told[i]):
            if not complaint and j not in seen:
                seen.add(j)
                if j not in owner or placed(owner[j], seen):
                    owner[j] = i
                    return True
        return False

    for i in range(len(told)):
        placed(i, set())
    mine = {i: j for j, i in owner.items()}
    return [mine.get(i) for i in range(len(told))]


def _distance(complaint: str) -> int:
    """Orders complaints: the call that is nearest to the wanted one first."""
    return 2 if " is called, not " in complaint else int(" lacks " in complaint)


def _listed(values: Sequence[Any]) -> str:
    shown = [f"{value!r:.60}" for value in values[:3]]
    return " or ".join(shown) + (" or another" if len(values) > 3 else "")
