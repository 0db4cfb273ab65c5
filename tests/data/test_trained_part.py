"""What SFT trains of a row with a prompt and a response: the response alone, as in TRL's
prompt-completion form, whatever turns the prompt's column holds.
"""

import json

import pytest
from published_templates import FAMILIES, write_folder
from test_formats import sft, sft_run, write
from test_published_templates import ASKED, CALL, RESULT, SAID, TOOL, spans

from compass_jax.config import DataConfig, FileSource
from compass_jax.data.files import DataError
from compass_jax.data.questions import questions
from compass_jax.data.sft import conversations, sft_examples
from compass_jax.data.streamed import sft_records
from compass_jax.data.tokenizer import Tokenizer

AGAIN = {"role": "user", "content": "And 1 + 2?"}
LAST = {"role": "assistant", "content": "3"}
SYSTEM = {"role": "system", "content": "Be brief."}
# name -> (row, the texts that are trained, without their end tokens)
ROWS = {
    "conversational": ({"prompt": [ASKED, SAID, AGAIN], "completion": [LAST]}, ["3"]),
    "with a system turn": ({"prompt": [SYSTEM, ASKED, SAID, AGAIN], "completion": [LAST]}, ["3"]),
    "as JSON text": (
        {"prompt": json.dumps([ASKED, SAID, AGAIN]), "completion": json.dumps([LAST])},
        ["3"],
    ),
    "texts": ({"prompt": "And 1 + 2?", "completion": "3"}, ["3"]),
    "a chat and a text": ({"prompt": [ASKED, SAID, AGAIN], "completion": "3"}, ["3"]),
    "a text and a chat": ({"prompt": "And 1 + 2?", "completion": [LAST]}, ["3"]),
    "two turns": ({"prompt": [ASKED], "completion": [SAID, AGAIN, LAST]}, ["2", "3"]),
    "verl": (
        {
            "prompt": [ASKED, SAID, AGAIN],
            "reward_model": {"ground_truth": "3"},
            "extra_info": {"answer": "3"},
        },
        ["3"],
    ),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    return {name: Tokenizer.load(write_folder(folder / name, name)) for name in FAMILIES}


def examples_of(tmp_path, row, tokenizer, **fields):
    config = sft_run(write(tmp_path / "rows.jsonl", [row]), buckets=(1024,), **fields)
    return sft_examples(config.sft, config.scored, tokenizer, lambda line: None)[0]


def texts_of(tokenizer, example):
    return [
        tokenizer.decode_response(span)
        for part in example.sequences()
        for span in spans(tokenizer, (part.tokens, part.mask))
    ]


@pytest.mark.parametrize("name", ROWS)
def test_the_response_is_trained_and_nothing_of_the_prompt(tmp_path, tokenizers, name):
    row, texts = ROWS[name]
    tokenizer = tokenizers["qwen2_5"]
    (example,) = examples_of(tmp_path, row, tokenizer)
    assert texts_of(tokenizer, example) == texts
    assert example.tokens[example.mask][-1] == tokenizer.eos_id
    assert example.mask.sum() == sum(len(tokenizer.encode(text)) + 1 for text in texts)


@pytest.mark.parametrize("name", FAMILIES)
def test_it_follows_the_prompt_that_rl_renders(tmp_path, tokenizers, name):
    """Also where the template rewrites earlier turns: an untrained turn makes no sequence."""
    row = {"prompt": [ASKED, SAID, AGAIN], "completion": [LAST], "answer": "3"}
    tokenizer = tokenizers[name]
    (example,) = examples_of(tmp_path, row, tokenizer)
    source = FileSource(str(tmp_path / "rows.jsonl"))
    (question,) = questions(DataConfig(sources=(source,)), 0, lambda line: None)
    prompt = tokenizer.encode_prompt(question.messages)
    assert example.sizes == () and not example.mask[: len(prompt)].any()
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert example.mask[len(prompt) :].all()
    assert "3" in tokenizer.decode(example.tokens[len(prompt) :])


def test_calls_in_the_prompt_are_context(tmp_path, tokenizers):
    row = {"prompt": [ASKED, CALL, RESULT], "completion": [SAID], "tools": [TOOL]}
    (example,) = examples_of(tmp_path, row, tokenizers["qwen3"])
    assert [x.strip() for x in texts_of(tokenizers["qwen3"], example)] == [
        "<think>\n\n</think>\n\n2"
    ]


def test_a_whole_conversation_trains_every_turn(tmp_path, tokenizers):
    row = {"messages": [ASKED, SAID, AGAIN, LAST]}
    (example,) = examples_of(tmp_path, row, tokenizers["qwen2_5"])
    assert texts_of(tokenizers["qwen2_5"], example) == ["2", "3"]


def test_named_columns_and_rows_by_record_are_the_same(tmp_path, tokenizers):
    row = {"talk": [ASKED, SAID, AGAIN], "reply": "3"}
    fields = {"prompt_field": "talk", "response_field": "reply"}
    (example,) = examples_of(tmp_path, row, tokenizers["qwen2_5"], **fields)
    path = str(tmp_path / "rows.jsonl")
    config = sft_run(
        path, buckets=(1024,), reading="record", data=DataConfig(cache=str(tmp_path)), **fields
    )
    records, _ = sft_records(config.sft, config.scored, tokenizers["qwen2_5"], lambda line: None)
    assert records[0].key == example.key and texts_of(tokenizers["qwen2_5"], example) == ["3"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": [ASKED, SAID], "completion": [LAST]}, "'completion': it goes on with the ass"),
        ({"prompt": [ASKED, SAID], "completion": "3"}, "'completion': it goes on with the assis"),
        ({"prompt": [ASKED, SAID], "completion": [AGAIN]}, "no assistant message"),
        ({"prompt": [ASKED, SAID, AGAIN], "completion": " "}, r"messages\[3\] of role 'assistant'"),
    ],
)
def test_a_response_that_is_none_is_refused(tmp_path, row, reason):
    with pytest.raises(DataError, match=rf"line 1.*{reason}"):
        list(conversations(*sft(write(tmp_path / "rows.jsonl", [row])), lambda line: None))


def test_an_empty_turn_of_the_prompt_is_context(tmp_path, tokenizers):
    row = {"prompt": [ASKED, {**SAID, "content": ""}, AGAIN], "completion": [LAST]}
    (example,) = examples_of(tmp_path, row, tokenizers["qwen2_5"])
    assert texts_of(tokenizers["qwen2_5"], example) == ["3"]
