"""Rows with messages as OpenAI's clients write them: developer turns, and contents in parts."""

import dataclasses
import json

import pytest
from published_templates import write_folder
from tiny_run import TOKENIZER, tiny_run

from compass_jax.config import DataConfig, FileSource, SFTConfig
from compass_jax.data.files import DataError
from compass_jax.data.messages import check_messages
from compass_jax.data.prompts import train_prompts
from compass_jax.data.questions import questions
from compass_jax.data.sft import sft_examples
from compass_jax.data.tokenizer import Tokenizer


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


DEVELOPER = {"role": "developer", "content": "Be brief."}


def data_of(tmp_path, *rows, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(sources=(FileSource(str(path)),), heldout_frac=0.0, **settings)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (parts("1 + 1?"), "1 + 1?"),
        (parts("1 + ", "1?"), "1 + 1?"),
        ([{"type": "text", "text": "1 + 1?", "image_url": None}], "1 + 1?"),
        (parts("1 +", " ", "1", "?"), "1 + 1?"),
    ],
)
def test_parts_of_text_are_one_text_with_nothing_between(content, text):
    assert check_messages([{"role": "user", "content": content}], "here") == [
        {"role": "user", "content": text}
    ]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text"},
        {"type": "text", "text": "x", "cache_control": {}},
        {"type": "text", "text": 3},
        {"text": "x"},
        "x",
        None,
    ],
)
def test_other_parts_are_refused_with_their_place(part):
    content = [*parts("x"), part]
    with pytest.raises(DataError, match=r"^here: messages\[0\].*of which part 1 is"):
        check_messages([{"role": "user", "content": content}], "here")


def test_a_row_in_parts_is_the_prompt_of_the_row_in_texts(tmp_path):
    tokenizer = Tokenizer.load(TOKENIZER)
    row = {"prompt": [{"role": "user", "content": parts("1 + ", "1?")}], "answer": "2"}
    (prompt,) = train_prompts(data_of(tmp_path, row), tokenizer, 0)
    (other,) = train_prompts(data_of(tmp_path, {"prompt": "1 + 1?", "answer": "2"}), tokenizer, 0)
    assert prompt.tokens.tolist() == other.tokens.tolist() and prompt.id == other.id


def test_a_developer_s_turn_is_the_system_s_and_asks_nothing(tmp_path):
    tokenizer = Tokenizer.load(TOKENIZER)
    ask = {"role": "user", "content": "1 + 1?"}
    row = {"prompt": [DEVELOPER, ask], "answer": "2"}
    data = data_of(tmp_path, row, system_prompt="Think.")
    (question,) = questions(data, 0)
    assert question.text == "1 + 1?" and [m["role"] for m in question.messages] == [
        "developer",
        "user",
    ]
    (prompt,) = train_prompts(data, tokenizer, 0)
    system = [{**DEVELOPER, "role": "system"}, ask]
    assert prompt.tokens.tolist() == tokenizer.encode_chat(system, True)


def test_a_template_that_names_developers_has_them(tmp_path):
    tokenizer = Tokenizer.load(write_folder(tmp_path / "tokenizer", "gpt_oss"))
    text = tokenizer.render([DEVELOPER, {"role": "user", "content": "?"}])
    assert "<|start|>developer<|message|># Instructions\n\nBe brief." in text


def test_sft_reads_both(tmp_path):
    tokenizer = Tokenizer.load(TOKENIZER)
    talk = [DEVELOPER, {"role": "user", "content": parts("1 + ", "1?")}]
    path = tmp_path / "talk.jsonl"
    path.write_text(
        json.dumps({"messages": [*talk, {"role": "assistant", "content": parts("2")}]}) + "\n"
    )
    base = tiny_run()
    sft = SFTConfig(files=(str(path),), buckets=(128,))
    config = dataclasses.replace(base, data=DataConfig(), sft=sft)
    (example,), _ = sft_examples(config.sft, config.scored, tokenizer)
    assert tokenizer.decode(example.tokens[example.mask]) == "2"
    assert "system\nBe brief.\nuser\n1 + 1?" in tokenizer.decode(example.tokens)


def test_template_args_change_prompts_of_training_and_sft(tmp_path):
    """The argument in this test is Qwen3's enable_thinking."""
    folder = write_folder(tmp_path / "tokenizer", "qwen3")
    data = data_of(tmp_path, {"prompt": "1 + 1?", "answer": "2"})
    texts = []
    for template_args in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        tokenizer = Tokenizer.load(folder, template_args)
        (prompt,) = train_prompts(data, tokenizer, 0)
        texts.append(tokenizer.decode(prompt.tokens, special=True))
    assert texts[1] == texts[0] + "<think>\n\n</think>\n\n" and texts[2] == texts[0]


def test_template_args_are_a_mapping_and_name_no_variable_of_the_rows():
    data = DataConfig(template_args={"enable_thinking": False, "reasoning_effort": "high"})
    assert data.template_args == (("enable_thinking", False), ("reasoning_effort", "high"))
    data.validate()
    for name in ("messages", "tools", "add_generation_prompt", "not a name"):
        with pytest.raises(ValueError, match=r"data\.template_args: .* is no variable"):
            DataConfig(template_args={name: 1}).validate()
