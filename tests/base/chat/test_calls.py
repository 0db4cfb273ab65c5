"""Calls of tools: every format can be read back, and hostile text neither runs nor takes long."""

import json
import keyword
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compass_jax.base.chat.base import read_calls
from compass_jax.base.chat.calls import MOST_CALLS, MalformedCall, ToolCall

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}(\.[a-z_]{1,5})?", fullmatch=True).filter(
    lambda name: not any(map(keyword.iskeyword, name.split(".")))
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.sampled_from(["</tool_call>", "<tool_call>", "f(a=1)", "'\"\\", "```", "\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
KEYS = st.from_regex(r"[a-z]{1,6}_", fullmatch=True)
CALLS = st.lists(
    st.builds(ToolCall, NAMES, st.dictionaries(KEYS, VALUES, max_size=3), st.just(())),
    min_size=1,
    max_size=3,
)


def objects(calls):
    return [{"name": call.name, "arguments": call.arguments} for call in calls]


def hermes(calls):
    blocks = (f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in objects(calls))
    return "Let me see.\n" + "\n".join(blocks)


def openai(calls):
    entries = [
        {"type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
        for c in calls
    ]
    return json.dumps({"role": "assistant", "content": None, "tool_calls": entries})


def python(calls):
    texts = (
        f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
        for call in calls
    )
    return f"[{', '.join(texts)}]"


def equal_as_json(read, expected):
    """Returns whether the calls are equal as JSON text, which distinguishes True from 1, and 1 from
    1.0.
    """
    return json.dumps([c[:2] for c in read]) == json.dumps([c[:2] for c in expected])


@pytest.mark.parametrize("write", [hermes, openai, python, lambda c: json.dumps(objects(c))])
@given(CALLS)
def test_every_format_reads_back_what_was_written(write, calls):
    assert equal_as_json(read_calls(write(calls)), calls)
    assert equal_as_json(read_calls("<think>f(a=2)</think>\n" + write(calls)), calls)


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.from_regex(r"[\[{<(f\"'=:,\-1]*"))
def test_any_text_is_calls_none_or_malformed(text):
    for variant in (text, "<tool_call>" + text, "[f(a=" + text, '{"name": ' + text):
        try:
            assert all(isinstance(call, ToolCall) for call in read_calls(variant))
        except MalformedCall as error:
            assert str(error)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("I cannot help with that (sorry).", []),
        ("", []),
        ("[]", []),
        ('{"answer": 5}', []),
        ("<think>[f(a=1)]", []),
        ("f()", [ToolCall("f", {})]),
        ("f(1, b=-2)\ng(c=true, d=null)", [("f", {"b": -2}, (1,)), ("g", {"c": True, "d": None})]),
        ("So:\n```python\n[f(a=(1, 2))]\n```\nDone.", [ToolCall("f", {"a": [1, 2]})]),
        ('```json\n{"function": "f", "parameters": {}}\n```', [ToolCall("f", {})]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": ""}]', [ToolCall("f", {})]),
    ],
)
def test_what_is_a_call_and_what_is_none(text, calls):
    assert read_calls(text) == [ToolCall(*call) for call in calls]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', "not JSON"),
        ('<tool_call>{"name": "f", "arguments": {}}', "no </tool_call>"),
        ('<tool_call>{"name": "f"} and more</tool_call>', "no </tool_call>"),
        ("<tool_call>f(a=1)</tool_call>", "not JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "has no name"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "are no object"),
        ('<tool_call>{"name": "f", "name": "g"}</tool_call>', "comes twice"),
        ('[{"name": "f"}, 3]', "is no call"),
        ('{"name": "f", "arguments": "{"}', "arguments: not JSON"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN"),
        ("[f(a=1)", "not Python's syntax"),
        ("f(a=1, a=2)", "a more than once"),
        ("f(**{'a': 1})", r"\*\* more than once"),
        ("f(a=g(b=1))", "no value of JSON: g"),
        ("f(a=open('x'))", "no value of JSON: open"),
        ("f(a=1e999)", "no value of JSON"),
        ("f(a=" + "9" * 4000 + ")", "more than 19 digits"),
        ("f(a=-True)", "no value of JSON"),
        ("f(a=[0x" + "f" * 4000 + "])", "no value of JSON"),
        ("f(a=1 + 0x" + "f" * 4000 + ")", "no value of JSON"),
        ("f(a=[x for x in (1,)])", "no value of JSON"),
        ("f(a={1: 2})", "keys of an object must be strings"),
        ("f(a=1); import os", "an? Import stands"),
        ("f(a=1)(b=2)", "name must be a name"),
        ("f(" * 150 + ")" * 150, "no value of JSON|not Python"),
        ("f(a=" + "[" * 90 + "]" * 90 + ")", "nested deeper"),
        ("f(a=" + "9" * 25 + ")", "more than 19 digits"),
        ("f();" * (MOST_CALLS + 1), "65 calls, more than 64"),
        ('<tool_call>{"name": "f"}</tool_call>' * 999, "65 calls, more than 64"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(text, message):
    with pytest.raises(MalformedCall, match=message):
        read_calls(text)


def test_texts_without_end_are_refused_in_time():
    start = time.process_time()
    for text in (
        "<tool_call>" * 10**5,
        '<tool_call>{"name": "f"}</tool_call>' * 10**4,
        '<tool_call>{"a":' * 10**4,
        "f(a=" + "-" * 10**5 + "1)",
        "f(a=" + "-" * 9 * 10**4 + "1)",
        "f(a=" + "not " * 2 * 10**4 + "1)",
        "f(" * 4 * 10**4,
        "f(a='" + "x" * 10**6,
        "f();" * 2 * 10**4,
        "[" * 10**6,
        "[{" * 10**5,
    ):
        try:
            read_calls(text)
        except MalformedCall:
            continue
        assert text.startswith("[[")  # no call starts, so the text is not malformed
    read_calls("```\n" * 10**5 + "```json" * 10**5)
    assert time.process_time() - start < 10
