"""Tool calls, compared by value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compass_jax.tool_calls import MalformedCall, tool_calls
from compass_jax.verifiers.base import Example, Kind, complaints, one_of
from compass_jax.verifiers.extract import extract_answer
from compass_jax.verifiers.tool_matching import Verdict, compared, tools_by_name, wanted_calls

_NO_CALL = "no tool is called"


def judge(
    response: str, answer: Any, answer_tag: str, tools: Any = (), ordered: bool = False
) -> Mapping[str, Any]:
    """Returns 1 if the calls in the response are those of the reference.

    "name" is the share of the reference's calls whose tool was called. "arguments" is the share
    that was called with the right arguments.
    """
    return components(verdict(response, answer, answer_tag, tools, ordered))


def components(result: Verdict) -> dict[str, Any]:
    """Returns a verdict as a mapping with the reward and components."""
    parts = {"reward": result.reward, "name": result.name, "arguments": result.arguments}
    return parts if result.reason != _NO_CALL else {**parts, "extracted": False}


def verdict(
    response: str, answer: Any, answer_tag: str, tools: Any = (), ordered: bool = False
) -> Verdict:
    """Returns the verdict of `judge`, with its reason."""
    described = tools_by_name(tools)
    expected = wanted_calls(answer, described)
    inner = extract_answer(response, answer_tag) if answer_tag else None
    try:
        calls = tool_calls(_without_opened_thought(response) if inner is None else inner)
    except MalformedCall as error:
        return Verdict(0.0, 0.0, 0.0, str(error))
    if expected and not calls:
        return Verdict(0.0, 0.0, 0.0, _NO_CALL)
    return compared(calls, expected, described, ordered)


def _without_opened_thought(response: str) -> str:
    """Returns a response without the rest of a thought that the prompt's template opened."""
    opened = "<think>" in response
    return response if opened else response.rpartition("</think>")[2]


def why(response: str, answer: Any, answer_tag: str, tools: Any = (), ordered: bool = False) -> str:
    """Returns the reason for the verdict on the calls in the response."""
    return verdict(response, answer, answer_tag, tools, ordered).reason


KIND = Kind(
    judge,
    "the tools are called that the reference calls, with its arguments by value",
    Example(
        {"answer": [{"name": "weather", "arguments": {"city": "Paris", "days": 2}}]},
        '<tool_call>{"name": "weather", "arguments": {"days": 2.0, "city": "Paris"}}</tool_call>',
        "[weather(city='Paris', days='2')]",
    ),
    takes=("tools", "ordered"),
    looks_for="calls: in <tool_call>, as JSON, or in Python's syntax",
    complaint=complaints(ordered=one_of(True, False)),
    why=why,
)
