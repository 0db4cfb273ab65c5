"""Calls of tools compared with a reference: right ones, wrong ones and the reasons, by hand and on
generated rows."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compass_jax.base.chat.calls import ToolCall
from compass_jax.rewards.verifiers.kinds.tools import (
    Verdict,
    compared,
    judge,
    tools_by_name,
    verdict,
    wanted_calls,
)

TOOLS = [
    {
        "name": "area",
        "parameters": {
            "type": "dict",
            "properties": {"base": {"type": "integer"}, "unit": {"default": "cm"}},
            "required": ["base"],
        },
    },
    {"type": "function", "function": {"name": "move", "parameters": {"properties": {"to": {}}}}},
    {"type": "function", "function": {"name": "now"}},
]
MANY = [{"area": {"base": [10, 11], "unit": ["cm", ""]}}, {"move": {"to": [{"x": [1], "y": [""]}]}}]
TWICE = [{"name": "area", "arguments": {"base": 1}}, {"name": "area", "arguments": {"base": 2}}]


@pytest.mark.parametrize(
    ("response", "answer", "reason"),
    [
        ("area(base=1)\narea(base=2)", TWICE, ""),
        ("area(base=2)\narea(base=1, unit='cm')", TWICE, ""),
        ("area(2.0)\narea(1)", TWICE, ""),
        ("area(base=2)\narea(base=1, unit='m')", TWICE, "unit = 'm' is not 'cm'"),
        ("area(base=1)\narea(base=1)", TWICE, "base = 1 is not 2"),
        ("area(base=True)\narea(base=2)", TWICE, "base = True is not 1"),
        ("area(base='1')\narea(base=2)", TWICE, "base = '1' is not 1"),
        ("area(base=1)", TWICE, "1 calls instead of 2"),
        ("area(base=1)\narea(base=2)\nnow()", TWICE, "3 calls instead of 2"),
        ("area(base=1)\nvolume(base=2)", TWICE, "there is no tool 'volume'"),
        ("area(base=1)\nnow()", TWICE, "now is called, not area"),
        ("area(base=1)\narea()", TWICE, "area lacks base"),
        ("area(base=1, depth=2)\narea(base=2)", TWICE, "area takes no depth here"),
        ("area(1, 'cm', 3)\narea(base=2)", TWICE, "3 arguments without a name"),
        ("area(1, base=1)\narea(base=2)", TWICE, "gets base twice"),
        ("move(to={'x': 1})\narea(base=11)", MANY, ""),
        ("move(to={'x': 1, 'y': ''})\narea(base=10, unit='C.M.')", MANY, ""),
        ("move(to={'x': 2})\narea(base=11)", MANY, "to = {'x': 2} is not"),
        ("move(to={'y': ''})\narea(base=11)", MANY, "to = {'y': ''} is not"),
        ("move(to={'x': 1, 'z': 1})\narea(base=11)", MANY, "is not"),
        ("move(to={'x': 1})\narea(base=12)", MANY, "base = 12 is not 10 or 11"),
        ("move(to={'x': 1})\narea(base='')", MANY, "base = '' is not 10 or 11"),
        ("area(base=[])", [{"area": {"base": [], "unit": []}}], ""),
        ("area(base=[1])", [{"area": {"base": [], "unit": []}}], "base = [1] is not []"),
        ("Nothing fits.", [], ""),
        ("now()", [], "a tool is called where none should be"),
        ("f(x) = 2x + 1 has no root here.", [], ""),
        ("sin(x) is positive.", [], ""),
        ("f(x) = 2x", TWICE, "not Python's syntax"),
        ("now() is called", [], "a Compare stands where a call should"),
        ("f(x) = 2x <tool_call>{", [], "not JSON"),
        ("[f(a=1)", [], "not Python's syntax"),
        ("Nothing fits.", TWICE, "no tool is called"),
        ("area(base=1", TWICE, "not Python's syntax"),
        ("<answer>area(base=1);area(base=2)</answer> now()", json.dumps(TWICE), ""),
    ],
)
def test_by_hand(response, answer, reason):
    result = verdict(response, answer, "answer", TOOLS)
    assert reason in result.reason and bool(result.reason) == bool(reason), result
    assert result.reward == float(not reason)


def test_the_order_counts_where_it_is_asked_for():
    swapped = "area(base=2)\narea(base=1)"
    assert verdict(swapped, TWICE, "", TOOLS).reward == 1
    assert verdict(swapped, TWICE, "", TOOLS, ordered=True).reason == "area: base = 2 is not 1"
    assert verdict("area(base=1)\narea(base=2)", TWICE, "", TOOLS, ordered=True).reward == 1


def test_components_are_shares_of_the_wanted_calls():
    components = judge("area(base=1)\nmove(to=1)", TWICE, "", TOOLS)
    assert components == {"reward": 0.0, "name": 0.5, "arguments": 0.5}
    assert judge("area(base=1)\narea(base=7)", TWICE, "", TOOLS)["name"] == 1
    assert judge("none", TWICE, "") == {**dict.fromkeys(components, 0.0), "extracted": False}


def test_a_pairing_is_found_where_a_greedy_one_is_not():
    expected = wanted_calls([{"f": {"a": [1, 2]}}, {"f": {"a": [1]}}], {})
    for order in ((1, 2), (2, 1)):
        assert compared([ToolCall("f", {"a": a}) for a in order], expected, {}).reward == 1


@pytest.mark.parametrize("answer", [None, 3, "f(a=1)", [3], [{"f": 3}], [{"name": "volume"}]])
def test_a_reference_that_cannot_be_is_an_error_of_the_row(answer):
    with pytest.raises((ValueError, RuntimeError), match=r"reference|no call|no name|not JSON"):
        verdict("area(base=1)", answer, "", TOOLS)


VALUES = st.integers() | st.text() | st.booleans() | st.none() | st.lists(st.integers(), max_size=2)
CALL = st.builds(
    ToolCall,
    st.sampled_from("fgh"),
    st.dictionaries(st.sampled_from("abc"), VALUES),
    st.just(()),
)


@given(st.lists(CALL, min_size=1, max_size=4), st.randoms(), st.data())
def test_a_permutation_is_right_and_one_change_is_wrong(calls, random, data):
    expected = wanted_calls([{"name": c.name, "arguments": c.arguments} for c in calls], {})
    shuffled = random.sample(calls, len(calls))
    assert compared(shuffled, expected, {}) == Verdict(1.0, 1.0, 1.0, "")
    i = data.draw(st.integers(0, len(calls) - 1))
    first = shuffled[i]
    changed_calls = [
        first._replace(name="x"),
        first._replace(arguments={**first.arguments, "d": 0}),
    ]
    changed_calls += [
        first._replace(arguments={**first.arguments, key: 0.5}) for key in first.arguments
    ]
    for changed in changed_calls:
        result = compared([*shuffled[:i], changed, *shuffled[i + 1 :]], expected, {})
        assert (
            result.reward == 0
            and result.arguments == (len(calls) - 1) / len(calls)
            and result.reason
        )
    assert compared(shuffled[:i] + shuffled[i + 1 :], expected, {}).reward == 0


def test_tools_are_read_in_both_forms():
    tools = tools_by_name(json.dumps(TOOLS))
    assert tools["area"].parameters == ("base", "unit") and tools["area"].defaults == {"unit": "cm"}
    assert tools["move"].parameters == ("to",) and not tools_by_name(None)
