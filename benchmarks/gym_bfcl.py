"""BFCL's ground truth as answers: its calls score 1, and with one change 0.

    pip install --no-deps bfcl-eval
    python -m benchmarks.gym_bfcl

One turn: the calls made from `possible_answer`, written in each format of FORMATS; a row is right
where all of them score 1. Many turns: the calls of a request in one text, then one without a call.

A change is another value of one argument, one argument left out that must be there, one call left
out, or another name; each is made at every place. Over many turns BFCL looks at the effects of
calls, so that some changes make no difference: `ls(a=False)` where no file is hidden, or a look-up
left out whose result an earlier request gave. A change after which every request leaves the
simulated APIs in the same state, and has been given all that its ground truth gives, is `equal`,
and not counted as mutated.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compass_jax.base.chat.base import any_format, read_calls
from compass_jax.base.chat.calls import ToolCall
from compass_jax.data import bfcl
from compass_jax.rewards.verifiers.kinds.tools import verdict

OTHER = "zq"  # in no possible answer
KINDS = ("changed", "argument_dropped", "call_dropped", "renamed")

Calls = Sequence[ToolCall]


def hermes(calls: Calls) -> str:
    """Returns calls in the format of Hermes and Qwen."""
    bodies = (json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def as_json(calls: Calls) -> str:
    """Returns calls as a JSON list."""
    return json.dumps([{"name": one.name, "arguments": one.arguments} for one in calls])


def openai(calls: Calls) -> str:
    """Returns calls in the format of OpenAI's messages."""
    parts = [{"name": one.name, "arguments": json.dumps(one.arguments)} for one in calls]
    return json.dumps({"tool_calls": [{"type": "function", "function": one} for one in parts]})


def python(calls: Calls) -> str:
    """Returns calls in Python's syntax."""
    return f"[{', '.join(map(_python, calls))}]"


def _python(call: ToolCall) -> str:
    named = (f"{key}={value!r}" for key, value in call.arguments.items())
    return f"{call.name}({', '.join([*map(repr, call.positional), *named])})"


FORMATS = (hermes, as_json, openai, python)


def from_possible(truth: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    """Returns the calls of a possible answer: the first value of each argument, without the
    arguments that may only be left out.
    """
    return [ToolCall(name, _first(arguments)) for one in truth for name, arguments in one.items()]


def _first(arguments: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    choices = {key: [x for x in values if x != ""] for key, values in arguments.items()}
    return {key: _plain(values[0]) for key, values in choices.items() if values}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: x[0] for key, x in value.items() if x[0] != ""}
    return [_plain(x) for x in value] if isinstance(value, list) else value


def another(value: Any) -> Any:
    """Returns a value that is no possible answer, of the same type if that type has many values."""
    if isinstance(value, str):
        return f"{value} {OTHER}"
    if isinstance(value, list):
        return [*value, OTHER]
    if isinstance(value, dict):
        return {**value, OTHER: 1}
    return OTHER if value is None or isinstance(value, bool) else value + 77


def changes(calls: Calls, optional: Sequence[set[str]]) -> Iterator[tuple[str, list[ToolCall]]]:
    """Yields (kind, calls) with one change each. `optional` has each call's arguments that may be
    left out.
    """
    for i, call in enumerate(calls):
        before, after = [*calls[:i]], [*calls[i + 1 :]]
        yield "renamed", [*before, call._replace(name=f"{call.name}_{OTHER}"), *after]
        yield "call_dropped", [*before, *after]
        for key, value in call.arguments.items():
            rest = {k: x for k, x in call.arguments.items() if k != key}
            other = call._replace(arguments={**call.arguments, key: another(value)})
            yield "changed", [*before, other, *after]
            if key not in optional[i]:
                yield "argument_dropped", [*before, call._replace(arguments=rest), *after]
        for j, value in enumerate(call.positional):
            positional = [*call.positional]
            positional[j] = another(value)
            yield "changed", [*before, call._replace(positional=tuple(positional)), *after]


def single() -> tuple[Counter, Counter]:
    """Returns (right, all) of the sets of one turn: by set, and by kind of change."""
    right: Counter = Counter()
    total: Counter = Counter()
    for name in bfcl.SINGLE:
        for row in bfcl.single_rows(name):
            calls, truth = from_possible(row["answer"]), row["answer"]
            optional = [
                {key for key, values in arguments.items() if "" in values}
                for one in truth
                for arguments in one.values()
            ]
            total[name] += 1
            right[name] += all(_judged(row, write(calls)) == 1 for write in FORMATS)
            for kind, variant in changes(calls, optional):
                total[kind] += 1
                right[kind] += _judged(row, hermes(variant)) == 0
    for name in bfcl.IRRELEVANT:
        for row in bfcl.single_rows(name):
            called = row["tools"][0]["function"]["name"] if row["tools"] else "anything"
            total[name], total["called"] = total[name] + 1, total["called"] + 1
            right[name] += _judged(row, "None of the tools can do that.") == 1
            right["called"] += _judged(row, hermes([ToolCall(called, {})])) == 0
    return right, total


def _judged(row: Mapping[str, Any], response: str) -> float:
    return verdict(response, row["answer"], "answer", row["tools"]).reward


def conversation(requests: Sequence[Calls]) -> list[str]:
    """Returns the model's texts: each request's calls in one, then one without a call."""
    turns = [[python(calls)] * bool(calls) + ["Done."] for calls in requests]
    return [text for texts in turns for text in texts]


def played(row: Mapping[str, Any], requests: Sequence[Calls]) -> float:
    """Returns the reward of a conversation with these calls, which ends at its first error."""
    state = bfcl.conversation.start(row)
    for text in conversation(requests):
        turn = bfcl.conversation.step(state, text, any_format().read(text))
        if not turn.messages:
            break
    return turn.reward


def traces(row: Mapping[str, Any], requests: Sequence[Calls]) -> list[tuple[str, Counter]]:
    """Returns, for each request, the APIs' public state after it and the results of its calls."""
    apis, records = bfcl.Simulator(row), []
    for calls in requests:
        gave = Counter(map(apis.call, calls))
        states = {
            name: {k: repr(x) for k, x in vars(api).items() if not k.startswith("_")}
            for name, api in apis.apis.items()
        }
        records.append((json.dumps(states), gave))
    return records


def equal(one: Sequence[tuple[str, Counter]], other: Sequence[tuple[str, Counter]]) -> bool:
    """Returns whether calls with the traces `one` have all effects of those with the traces
    `other`.
    """
    so_far: Counter = Counter()
    for (state, gave), (expected_state, expected) in zip(one, other, strict=True):
        so_far += gave
        if state != expected_state or expected - so_far:
            return False
    return True


def multi() -> tuple[Counter, Counter]:
    """Returns (right, all) of the sets of many turns, like `single`; all["equal"] counts the
    changes without an effect.
    """
    right: Counter = Counter()
    total: Counter = Counter()
    for name in bfcl.MULTI:
        for row in bfcl.multi_rows(name):
            requests = [[c for text in one for c in read_calls(text)] for one in row["answer"]]
            total[name] += 1
            right[name] += played(row, requests) == 1
            untouched = traces(row, requests)
            for i, calls in enumerate(requests):
                for kind, variant in changes(calls, [set() for _ in calls]):
                    other = [*requests[:i], variant, *requests[i + 1 :]]
                    wrong = played(row, other) == 0
                    is_equal = not wrong and equal(traces(row, other), untouched)
                    total["equal" if is_equal else kind] += 1
                    right[kind] += wrong
    return right, total


def counts() -> dict[str, str]:
    """Counts the right verdicts on BFCL, as "right/all": `bfcl_single_right` and `bfcl_multi_right`
    are rows whose ground truth scores 1 (and rows that need no tool where none is called),
    `bfcl_mutated_right` are answers with one change that score 0, and a call where none is needed.
    `bfcl_mutated_equal` is the number of changes without an effect, which are left out.

    Raises UserError if the package bfcl-eval is not installed.
    """
    one, many = single(), multi()
    changed = (*KINDS, "called")

    def share(names: Sequence[str], *pairs: tuple[Counter, Counter]) -> str:
        right, total = (sum(pair[k][name] for pair in pairs for name in names) for k in (0, 1))
        return f"{right}/{total}"

    return {
        "bfcl_single_right": share((*bfcl.SINGLE, *bfcl.IRRELEVANT), one),
        "bfcl_multi_right": share(bfcl.MULTI, many),
        "bfcl_mutated_right": share(changed, one, many),
        "bfcl_mutated_equal": str(many[1]["equal"]),
    }


if __name__ == "__main__":
    print(json.dumps(counts()))
