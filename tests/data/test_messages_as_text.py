"""Chat messages and tools that a column holds as text: read as the list that they are, or refused
with the place and the reason.
"""

import json

import pytest
from test_formats import sft, write

from compass_jax.config import DataConfig, FileSource
from compass_jax.data.files import DataError
from compass_jax.data.message_text import messages_in
from compass_jax.data.messages import asked_of
from compass_jax.data.preferences import read_preferences
from compass_jax.data.questions import questions
from compass_jax.data.sft import conversations

ASKED = [{"role": "user", "content": "1 + 1?"}]
TURNS = [*ASKED, {"role": "assistant", "content": "2"}]
SPOKEN = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALLS = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]


def text_of(value, **options):
    return json.dumps(value, **options)


def asked(tmp_path, row, ending=".jsonl"):
    source = FileSource(write(tmp_path / f"rows{ending}", [row]), verifier="exact")
    (question,) = questions(DataConfig(sources=(source,)), 0, lambda line: None)
    return question


def taught(tmp_path, row):
    (conversation,) = conversations(*sft(write(tmp_path / "rows.jsonl", [row])), lambda line: None)
    return conversation


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": text_of(ASKED), "answer": "2"},
        {"prompt": text_of(ASKED, indent=2) + "\n", "answer": "2"},
        {"prompt": text_of([{"content": "1 + 1?", "role": "user"}]), "answer": "2"},
        {"prompt": text_of(text_of(ASKED)), "answer": "2"},
        {"prompt": text_of([{"name": None, "role": "user", "content": "1 + 1?"}]), "answer": "2"},
        {"prompt": text_of(ASKED), "reward_model": {"ground_truth": "2"}},
        {"prompt": text_of(ASKED), "completion": text_of(TURNS[1:])},
        {"messages": text_of(TURNS)},
        {"messages": text_of(ASKED), "answer": "2"},
        {"conversations": text_of(SPOKEN)},
        {"conversations": text_of([{**turn, "weight": None} for turn in SPOKEN])},
        {"question": text_of(ASKED), "answer": "so\n#### 2"},
    ],
)
def test_rl_asks_what_the_text_s_messages_ask(tmp_path, row, ending):
    question = asked(tmp_path, row, ending)
    assert [*question.messages] == ASKED and question.text == "1 + 1?"
    assert question.answer == "2"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": text_of(TURNS)},
        {"conversations": text_of(SPOKEN)},
        {"prompt": text_of(ASKED), "completion": text_of(TURNS[1:])},
        {"prompt": "1 + 1?", "completion": text_of(TURNS[1:])},
        {"prompt": text_of(ASKED), "completion": "2"},
        {"prompt": ASKED, "completion": text_of(text_of(TURNS[1:]))},
    ],
)
def test_sft_trains_on_the_text_s_messages(tmp_path, row):
    assert taught(tmp_path, row).messages == TURNS


def test_a_system_column_goes_before_turns_that_are_text(tmp_path):
    row = {"conversations": text_of(SPOKEN), "system": "Be brief.", "tools": text_of(TOOLS)}
    conversation = taught(tmp_path, row)
    assert conversation.messages == [{"role": "system", "content": "Be brief."}, *TURNS]
    assert conversation.tools == TOOLS


def test_tool_calls_may_be_text(tmp_path):
    called = {"role": "assistant", "content": "", "tool_calls": text_of(CALLS)}
    assert taught(tmp_path, {"messages": [*ASKED, called]}).messages[1]["tool_calls"] == CALLS
    with pytest.raises(DataError, match=r"messages\[1\], tool_calls: not JSON"):
        taught(tmp_path, {"messages": [*ASKED, {**called, "tool_calls": str(CALLS)}]})


def test_preferences_may_be_text(tmp_path):
    rows = [
        {"chosen": text_of(TURNS), "rejected": text_of([*ASKED, {**TURNS[1], "content": "3"}])},
        {"prompt": text_of(ASKED), "chosen": text_of(TURNS[1:]), "rejected": "3"},
    ]
    for pair in read_preferences(write(tmp_path / "pairs.jsonl", rows)):
        assert (pair.question, pair.candidate, pair.anchor) == ("1 + 1?", "2", "3")
    write(tmp_path / "pairs.jsonl", [{**rows[0], "rejected": str(TURNS)}])
    with pytest.raises(DataError, match=r"line 1: rejected: it begins as chat messages do"):
        list(read_preferences(str(tmp_path / "pairs.jsonl")))


def test_a_custom_task_s_prompt_may_be_text():
    assert asked_of(text_of(ASKED), "here") == ("1 + 1?", ASKED)


REFUSED = {
    "python": (str(ASKED), "cannot be read"),
    "python, two": (str(TURNS), "cannot be read"),
    "numpy": (f"array({TURNS[:1]}, dtype=object)", "cannot be read"),
    "cut off": (text_of(ASKED)[:-4], "cannot be read"),
    "cut off within a key": (text_of(TURNS)[:-18], "cannot be read"),
    "a comma too many": (text_of(ASKED)[:-1] + ",]", "cannot be read"),
    "lines": (text_of(TURNS[0]) + "\n" + text_of(TURNS[1]), "cannot be read"),
    "a list without brackets": (text_of(TURNS)[1:-1], "cannot be read"),
    "a key twice": ('[{"role": "user", "role": "user", "content": "x"}]', "comes twice"),
    "NaN": ('[{"role": "user", "content": "x", "score": NaN}]', "NaN is no number"),
    "one": (text_of(ASKED[0]), "one chat message"),
    "an object": (text_of({"messages": ASKED}), "an object with chat messages"),
    "a request": (text_of({"model": "m", "messages": TURNS}), "an object with chat messages"),
    "ShareGPT in Python": (str(SPOKEN), "cannot be read"),
    "a role": (text_of([{"role": "bot", "content": "x"}]), "has the role 'bot'"),
    "a part": (text_of([*ASKED, "2"]), r"messages\[1\] must be an object"),
    "twice, cut off": (text_of(text_of(ASKED))[:-5], "cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("reader", [asked, taught])
def test_messages_in_another_form_are_refused_with_their_place(tmp_path, name, reader):
    text, reason = REFUSED[name]
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 1, field 'prompt'.*{reason}"):
        reader(tmp_path, {"prompt": text, "completion": "2"})


@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize("name", ["python", "cut off", "an object", "lines"])
def test_a_column_of_messages_is_refused_too(tmp_path, column, name):
    text, reason = REFUSED[name]
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 1.*{reason}"):
        taught(tmp_path, {column: text})


def test_tools_in_another_form_are_refused_with_their_place(tmp_path):
    for tools, reason in (
        (str(TOOLS), "not JSON"),
        (text_of(TOOLS[0]), "must be a list of objects"),
        (text_of(text_of(TOOLS)), "must be a list of objects"),
        ([text_of(TOOLS[0])], "must be a list of objects"),
    ):
        with pytest.raises(DataError, match=rf"line 1, field 'tools'.*{reason}"):
            asked(tmp_path, {"prompt": "1 + 1?", "answer": "2", "tools": tools})


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3]",
        "[]",
        '{"role": "admin"}',
        '{"name": "x", "content": "y"}',
        '[{"from": "A", "to": "B", "value": 3}]',
        "[{'from': 'A', 'to': 'B', 'value': 3}]: which node is last?",
        text_of(ASKED) + "\nWhat does the user ask?",
        '{"role": "user", "content": "x"} is a message. Whose?',
        "What is the role in " + text_of(ASKED) + "?",
        '"role": "user", "content": what is missing?',
        "[" * 100_000,
        '[{"' * 50_000,
        '{"a": ' * 20_000,
        " " * 1_000_000,
        "[" + "\n" * 1_000_000,
        '{"role' + " " * 1_000_000,
        "int main() { return 0; }",
        '"[1]"',
        "",
    ],
)
def test_other_texts_stay_texts(text):
    assert messages_in(text, "here") is text
