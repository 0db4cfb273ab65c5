"""Functions as tools: schemas, calls in every form, and faults as messages."""

import json
from typing import Annotated, Literal

import pytest
from pydantic import Field

from compass_jax.base.chat.base import any_format
from compass_jax.base.chat.calls import ToolCall
from compass_jax.rewards.tasks.tools import MOST_CHARS, ToolError, Tools


def weather(city: str, days: Annotated[int, Field(ge=1)] = 1, unit: Literal["C", "F"] = "C"):
    """Returns the forecast of a city.

    It may rain.

    Args:
        city: the name of the city,
            in any language.
        days (int): how many days.

    Raises ValueError for an unknown city.
    """
    if city == "Nowhere":
        raise ValueError("no such city")
    return {"city": city, "days": days, "unit": unit}


def total(values: list[float], title: str | None = None) -> str:
    """Adds numbers."""
    return f"{title}: {sum(values):g}"


def schema() -> str:
    return "x" * (MOST_CHARS + 5)


TOOLS = Tools(weather, total, schema)


def answered(text):
    return [json.loads(x["content"]) for x in TOOLS.answer(any_format().read(text))]


def test_a_function_becomes_a_schema():
    first, second, third = (one["function"] for one in TOOLS.schemas)
    assert first == {
        "name": "weather",
        "description": "Returns the forecast of a city.",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "required": ["city"],
            "properties": {
                "city": {
                    "type": "string",
                    "description": "the name of the city, in any language.",
                },
                "days": {
                    "type": "integer",
                    "minimum": 1,
                    "default": 1,
                    "description": "how many days.",
                },
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            },
        },
    }
    assert set(second["parameters"]["properties"]) == {"values", "title"}
    assert third["parameters"]["properties"] == {} and third["description"] == ""
    assert json.loads(json.dumps(TOOLS.schemas)) == TOOLS.schemas


def test_calls_of_any_form_are_run_with_values_of_the_declared_types():
    paris = {"city": "Paris", "days": 2, "unit": "C"}
    for text in (
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 2}}</tool_call>',
        "<think>so</think>[weather('Paris', days=2)]",
        '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": "2"}',
    ):
        assert answered(text) == [paris]
    glm = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>42</arg_value>\n</tool_call>"
    assert answered(glm) == [{**paris, "city": "42", "days": 1}]
    two = TOOLS.answer(any_format().read("[total([1, 2.5]), total(values=[], title='t')]"))
    assert two == [
        {"role": "tool", "name": "total", "content": "None: 3.5"},
        {"role": "tool", "name": "total", "content": "t: 0"},
    ]
    assert TOOLS.answer(any_format().read("No call.")) == []
    assert TOOLS.run(ToolCall("schema", {})).endswith("... (5 more characters)")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('<tool_call>{"name": "weather"', "no call: after <tool_call>: not JSON"),
        ("wether(city='x')", "there is no tool 'wether'; there is weather, total, schema"),
        ("weather()", "weather: city: Field required"),
        ("weather(city='x', days='many')", "weather: days: Input should be a valid integer"),
        ("weather(city='x', days=0)", "weather: days: Input should be greater than or equal to 1"),
        ("weather(city='x', unit='K')", "weather: unit: Input should be 'C' or 'F'"),
        ("weather(city='x', when=1)", "weather: it takes no when"),
        ("weather('x', city='y')", "weather gets city twice"),
        ("weather('x', 1, 'C', 2)", "weather takes 3 arguments"),
        ("weather(city='Nowhere')", "weather: ValueError: no such city"),
        ("total(values=['a'])", "total: values.0: Input should be a valid number"),
    ],
)
def test_a_fault_is_a_message_for_the_model(text, error):
    (reply,) = answered(text)
    assert reply["error"].startswith(error)


def test_a_function_that_cannot_be_a_tool_is_refused():
    def bare(x):
        return x

    def several(*values: int):
        return values

    def unknown(x: "Missing"):  # noqa: F821
        return x

    for function, reason in [
        (bare, "bare: the parameter x has no type hint; add one"),
        (several, r"several: the parameter \*values: int has no name"),
        (unknown, "unknown: a type hint cannot be read"),
    ]:
        with pytest.raises(ToolError, match=reason):
            Tools(function)
    with pytest.raises(ToolError, match="two tools are called 'total'"):
        Tools(total, total)
