"""Rows in the formats of verl, TRL, ShareGPT, OpenAI and GSM8K, recognised by their columns; each
sample follows the documentation of its format.
"""

import json
import re

import pyarrow
import pytest
from pyarrow import parquet

from compass_jax.config import DataConfig, FileSource, ModelConfig, RunConfig, SFTConfig
from compass_jax.data.files import DataError, files_of, read_rows
from compass_jax.data.formats import reference
from compass_jax.data.prompts import heldout_prompts
from compass_jax.data.questions import label_of, questions
from compass_jax.data.sft import conversations

SOLVED = "She sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = 72.\n#### 72"
ASKED = "How many clips did Natalia sell?"
TURNS = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SOLVED}]
SPOKEN = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": SOLVED}]
# name -> (row, its notice in RL, its notice in SFT, or None for a row that SFT cannot use)
ROWS = {
    "verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": TURNS[:1],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"split": "train", "index": 0, "answer": SOLVED, "question": ASKED},
        },
        "verl rows: prompt, reward_model.ground_truth",
        "verl rows: prompt, extra_info.answer",
    ),
    "trl_text": (
        {"prompt": ASKED, "completion": SOLVED},
        "TRL rows: prompt, completion",
        "TRL rows: prompt, completion",
    ),
    "trl_chat": (
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
        "TRL rows: prompt, completion",
        "TRL rows: prompt, completion",
    ),
    "trl_solution": ({"prompt": TURNS[:1], "solution": "72"}, "TRL rows: prompt, solution", None),
    "trl_truth": ({"prompt": ASKED, "ground_truth": 72}, "TRL rows: prompt, ground_truth", None),
    "sharegpt": (
        {"conversations": SPOKEN},
        "ShareGPT rows: conversations",
        "ShareGPT rows: conversations",
    ),
    "openai": ({"messages": TURNS}, "OpenAI rows: messages", "OpenAI rows: messages"),
    "gsm8k": (
        {"question": ASKED, "answer": SOLVED},
        "GSM8K rows: question, answer",
        "GSM8K rows: question, answer",
    ),
}


def write(path, rows):
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sft_run(*files, data=None, **fields):
    """Returns the configuration of SFT on these files."""
    model = ModelConfig("qwen3", 300, 16, 1, 2, 1, 8, 32)
    sft = SFTConfig(files=files, **fields)
    return RunConfig("test", model, data=data or DataConfig(), sft=sft)


def sft(*files, **fields):
    """Returns the settings of SFT on these files, and the system prompt."""
    config = sft_run(*files, **fields)
    return config.sft, config.data.system_prompt


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_each_format_asks_and_compares_with_the_same(tmp_path, name, ending):
    row, notice, _ = ROWS[name]
    path = write(tmp_path / f"rows{ending}", [row, {**row, "difficulty": "easy"}])
    notices = []
    (question,) = questions(DataConfig(sources=(FileSource(path),)), 0, notices.append)
    assert notices[0] == f"rows{ending}: {notice}"
    assert [re.sub(r".*: ", "", line) for line in notices[1:]] == [
        "1 rows repeat an earlier prompt with its answer; they are left out"
    ]
    assert (question.text, question.answer) == (ASKED, "72")
    assert question.messages == ({"role": "user", "content": ASKED},)
    assert json.loads(question.row) in ({"answer": "72"}, {"answer": 72})


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row[2]])
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_each_format_teaches_the_same_conversation(tmp_path, name, ending):
    row, _, notice = ROWS[name]
    notices = []
    (conversation,) = conversations(*sft(write(tmp_path / f"rows{ending}", [row])), notices.append)
    assert notices == [f"rows{ending}: {notice}"]
    assert conversation.messages == TURNS and conversation.label == "rows"


def test_sharegpt_has_a_system_and_tools_beside_its_turns_and_a_tool_observes(tmp_path):
    tool = {"type": "function", "function": {"name": "clips"}}
    seen = {"from": "observation", "value": "24 in May"}
    row = {"conversations": [*SPOKEN, seen, *SPOKEN], "system": "S", "tools": json.dumps([tool])}
    path = write(tmp_path / "rows.jsonl", [row])
    (conversation,) = conversations(*sft(path), print)
    roles = ["system", "user", "assistant", "tool", "user", "assistant"]
    assert [m["role"] for m in conversation.messages] == roles and conversation.tools == [tool]
    (question,) = questions(DataConfig(sources=(FileSource(path),)), 0, print)
    assert [m["role"] for m in question.messages] == roles[:-1] and question.answer == "72"
    assert question.tools == (tool,)


def test_a_prompt_is_learnt_as_it_is_asked_in_rl(tmp_path):
    """The system prompt of `data` precedes a prompt that has a response column, and is not added to
    a full conversation.
    """
    data = DataConfig(system_prompt="Be brief.")
    path = write(tmp_path / "rows.jsonl", [ROWS["gsm8k"][0]])
    (conversation,) = conversations(*sft(path, data=data), print)
    (question,) = questions(DataConfig((FileSource(path),), system_prompt="Be brief."), 0, print)
    assert tuple(conversation.messages[:-1]) == question.messages
    path = write(tmp_path / "chats.jsonl", [ROWS["openai"][0]])
    (conversation,) = conversations(*sft(path, data=data), print)
    assert conversation.messages == TURNS


def test_settings_win_over_the_columns(tmp_path):
    """The settings decide about a row that fits several formats, without a notice."""
    row = {
        **ROWS["verl"][0],
        "answer": "1",
        "completion": "2",
        "mine": {"q": "Q?", "a.b": {"c": 3}},
    }
    path = write(tmp_path / "rows.jsonl", [row])
    notices = []
    for fields, text, answer in (
        ({}, ASKED, "1"),
        ({"answer_field": "completion"}, ASKED, "2"),
        ({"prompt_field": "mine.q"}, "Q?", "1"),
        ({"prompt_field": "mine.q", "answer_field": "reward_model.ground_truth"}, "Q?", "72"),
    ):
        source = FileSource(path, **fields)
        (result,) = questions(DataConfig(sources=(source,)), 0, notices.append)
        assert (result.text, result.answer) == (text, answer)
    for fields, response in (
        ({"response_field": "completion"}, "2"),
        ({"prompt_field": "mine.q", "response_field": "answer"}, "1"),
    ):
        (result,) = conversations(*sft(path, **fields), notices.append)
        assert result.messages[-1] == {"role": "assistant", "content": response}
    path = write(tmp_path / "own.parquet", [{"chat": SPOKEN}])
    (result,) = conversations(*sft(path, prompt_field="chat", response_field=""), notices.append)
    assert result.messages == TURNS
    assert notices == []


def test_a_verifier_of_ones_own_gets_the_whole_row_and_needs_no_reference(tmp_path):
    row = ROWS["verl"][0]
    path = write(tmp_path / "a.parquet", [row])
    source = FileSource(path, verifier="m:score")
    (question,) = questions(DataConfig(sources=(source,)), 0, print)
    assert json.loads(question.row) == {**row, "answer": "72"}
    notices = []
    bare = FileSource(write(tmp_path / "b.jsonl", [{"prompt": ASKED, "id": 7}]), verifier="m:score")
    (question,) = questions(DataConfig(sources=(bare,)), 0, notices.append)
    assert json.loads(question.row) == {"prompt": ASKED, "id": 7} and question.answer == ""
    assert notices == ["b.jsonl: prompt-only rows: prompt"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (SOLVED, "72"),
        ("#### -1,200 \n", "-1,200"),
        ("72", "72"),
        ("a\n#### 5\nb", "a\n#### 5\nb"),
        ("x #### 5", "x #### 5"),
        ("x\n##### Title", "x\n##### Title"),
        ("####", "####"),
        (7, 7),
        (["#### 1"], ["#### 1"]),
        ([{"role": "assistant", "content": "#### 1"}], "1"),
        ([{"role": "user", "content": "#### 1"}], [{"role": "user", "content": "#### 1"}]),
    ],
)
def test_the_reference_is_what_stands_on_the_last_line_after_four_hashes(value, expected):
    assert reference(value) == expected


def test_a_pattern_reads_its_files_by_name_and_a_source_says_its_kind_of_each(tmp_path):
    for n in (2, 0, 1):
        write(tmp_path / f"train-{n:05d}.jsonl", [{"question": f"{n}+1?", "answer": f"#### {n}"}])
    write(tmp_path / "other.jsonl", [{"question": "no", "answer": "1"}])
    pattern, notices = f"{tmp_path}/train-*.jsonl", []
    pool = questions(DataConfig(sources=(FileSource(pattern),)), 0, notices.append)
    assert [q.answer for q in pool] == ["0", "1", "2"] and {q.label for q in pool} == {"train"}
    assert notices == [f"train-{n:05d}.jsonl: GSM8K rows: question, answer" for n in range(3)]
    assert len(list(conversations(*sft(pattern), notices.append))) == 3
    with pytest.raises(DataError, match=r"gone-\*\.jsonl does not exist: no file fits"):
        files_of(f"{tmp_path}/gone-*.jsonl")
    odd = tmp_path / "a[1].jsonl"
    odd.write_text("x")
    assert files_of(str(odd)) == [str(odd)]
    assert [label_of(x) for x in ("d/a.b.jsonl", "d/*.jsonl", "[0-9].jsonl")] == [
        "a.b",
        "d",
        "[0-9]",
    ]


def test_an_evaluation_file_is_held_out_whole_and_what_is_in_both_is_left_out(tmp_path):
    """Four of 30 training rows are in the evaluation too, one with other white space; the other 26
    are all trained on.
    """
    train = write(
        tmp_path / "train.jsonl", [{"prompt": f"{n} + 1?", "answer": n} for n in range(30)]
    )
    rows = [{"prompt": f"{n} + 1?", "answer": n} for n in (3, 4, 5, 90, 91)]
    test = write(tmp_path / "test.jsonl", [*rows, {"prompt": " 6  + 1?", "answer": 6}])
    notices = []
    sources = {"sources": (FileSource(train),), "eval_sources": (FileSource(test, label="held"),)}
    data = DataConfig(**sources, heldout_frac=0.5)
    pool = questions(data, 0, notices.append)
    heldout = [q for q in pool if q.heldout]
    assert [q.answer for q in heldout] == ["3", "4", "5", "90", "91", "6"]
    assert {(q.source, q.label) for q in heldout} == {(1, "held")}
    assert [q.answer for q in pool if not q.heldout] == [
        str(n) for n in range(30) if n not in {3, 4, 5, 6}
    ]
    assert len({q.id for q in pool}) == len(pool) == 32
    assert notices == [
        "4 of 30 training questions are in data.eval_sources too; they are left out of the training"
    ]
    (tmp_path / "test.jsonl").write_text("")
    for read in (questions, heldout_prompts):
        with pytest.raises(DataError, match=r"test\.jsonl is empty"):
            read(*((data, 0, print) if read is questions else (data, None, 0)))


UNKNOWN = r"line 1: these columns are of no known kind: (text|a, a\.b); name them in "


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "x"}], UNKNOWN + r"data\.sources\[0\]\.prompt_field and .*answer_field"),
        ([{"a": {"b": 1}}], UNKNOWN + r".*or write one of: prompt \+ answer \(plain\), .*verl"),
        (
            [ROWS["verl"][0], ROWS["gsm8k"][0]],
            r"line 2: no field 'prompt' \(fields: question, answer\); add it or set data\.sources",
        ),
        (
            [ROWS["verl"][0], {"prompt": "x", "reward_model": {"style": "rule"}}],
            r"line 2: no field 'reward_model\.ground_truth' \(fields: prompt, reward_model,"
            r" reward_model\.style\); add it or set data\.sources\[0\]\.answer_field",
        ),
        (
            [ROWS["verl"][0], {"prompt": "x", "reward_model": {"ground_truth": None}}],
            r"line 2: 'reward_model\.ground_truth' is null",
        ),
        (
            [ROWS["verl"][0], {"prompt": "x", "reward_model": "72"}],
            r"line 2: no field 'reward_model\.ground_truth' \(fields: prompt, reward_model\)",
        ),
        (
            [{"conversations": SPOKEN[:1]}],
            r"line 1, field 'conversations': ends with what is asked.*data\.sources\[0\]\.answer_f",
        ),
        (
            [{"conversations": [{"from": "function_call", "value": "{}"}]}],
            r"line 1, field 'conversations'\[0\] is from 'function_call'; known: hum.*tool_calls",
        ),
        (
            [{"conversations": [{"from": "human"}, SPOKEN[1]]}],
            r"line 1, field 'conversations'\[0\] must be an object with 'from' and 'value'",
        ),
        ([{"messages": "x"}], r"line 1, field 'messages': messages must be a non-empty list"),
        ([{"messages": TURNS, "tools": "{"}], r"line 1, field 'tools': not JSON"),
    ],
)
def test_rows_that_cannot_be_used_are_named_with_their_place(tmp_path, rows, message):
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=re.escape(path) + ", " + message) as exc_info:
        questions(DataConfig(sources=(FileSource(path),)), 0, print)
    assert "\n" not in str(exc_info.value) and len(str(exc_info.value)) < 1000


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "x", "answer": "1"}], r"no known kind: prompt, answer; name them in sft\.p"),
        ([{"prompt": "x", "reward_model": {"ground_truth": "1"}}], r"no known kind: .*response_fi"),
        ([ROWS["trl_text"][0], {"prompt": "x"}], r"line 2: no field 'completion'.*sft\.response_f"),
        ([{"prompt": "x", "completion": " "}], r"line 1: messages\[1\] of role 'assistant' is em"),
        ([{"prompt": 3, "completion": "y"}], r"line 1, field 'prompt': messages must be"),
    ],
)
def test_rows_that_teach_nothing_are_named_with_their_place(tmp_path, rows, message):
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=message):
        list(conversations(*sft(path), print))


def test_of_a_parquet_struct_only_the_field_that_is_named_is_read(tmp_path):
    far = pyarrow.array(
        [2**61], pyarrow.timestamp("us")
    )  # outside Python's dates: reading it raises
    struct = pyarrow.StructArray.from_arrays([pyarrow.array(["72"]), far], ["ground_truth", "when"])
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["q"], "reward_model": struct}), path)
    fields = {"prompt": "add it", "reward_model.ground_truth": "add it"}
    ((_, row),) = read_rows(str(path), fields)
    assert row == {"prompt": "q", "reward_model": {"ground_truth": "72"}}
    parquet.write_table(pyarrow.table({"prompt": ["q"], "reward_model": [{"style": "rule"}]}), path)
    source = FileSource(str(path), answer_field="reward_model.ground_truth")
    with pytest.raises(DataError, match=r"no field 'reward_model\.ground_truth' \(fields: prompt"):
        questions(DataConfig(sources=(source,)), 0, print)
