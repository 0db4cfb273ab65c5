"""The tokens of an environment's messages are those that the chat template writes."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_run import TOKENIZER

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.turns import turn_encoder
from compass_jax.data.vocabulary import TokenizerError

TALK = [
    {"role": "user", "content": "Buy 2 pen."},
    {"role": "assistant", "content": '{"buy":["pen",2]}'},
    {"role": "tool", "content": "12"},
    {"role": "assistant", "content": "Done."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(TOKENIZER)


def test_a_conversation_in_pieces_is_the_conversation(tokenizer):
    """Prompt, turn, reply and turn together are the tokens that supervised fine-tuning sees."""
    prompt = tokenizer.encode_chat(TALK[:1], add_generation_prompt=True)
    turns = [[*tokenizer.encode(TALK[n]["content"]), tokenizer.eos_id] for n in (1, 3)]
    reply = turn_encoder(tokenizer)(json.dumps(TALK[2:3]), turns[0])
    tokens, mask = tokenizer.encode_example(TALK)
    assert [*prompt, *turns[0], *reply, *turns[1]] == tokens.tolist()
    expected_mask = [False] * len(prompt) + [True] * len(turns[0]) + [False] * len(reply)
    assert mask.tolist() == expected_mask + [True] * len(turns[1])


def test_a_tool_s_answer_is_that_of_the_template_for_tools(tmp_path):
    for file in Path(TOKENIZER).iterdir():
        shutil.copy(file, tmp_path)
    usual = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "additional_chat_templates").mkdir()
    for_tools = usual.replace("<|im_start|>' + m", "<|im_start|>of ' + m")
    assert for_tools != usual
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(for_tools)
    tokenizer = Tokenizer.load(tmp_path)
    answer = turn_encoder(tokenizer)(json.dumps(TALK[2:3]), [2])
    assert "of tool" in tokenizer.decode(answer, special=True)
    person = turn_encoder(tokenizer)(json.dumps([{"role": "user", "content": "1"}]), [2])
    assert "of user" not in tokenizer.decode(person, special=True)


def test_what_a_tool_says_is_text_whatever_it_spells(tokenizer):
    reply = turn_encoder(tokenizer)(json.dumps([{"role": "tool", "content": "<|im_end|>"}]), [2])
    assert reply.count(tokenizer.eos_id) == 1  # the end of the tool's turn


def test_what_the_template_does_not_show_is_refused(tokenizer):
    encode = turn_encoder(tokenizer)
    named = [{"role": "user", "content": "1", "name": "Al"}]
    with pytest.raises(TokenizerError, match="does not show the name"):
        encode(json.dumps(named), [2])
    assert encode(json.dumps([{"role": "tool", "content": "1", "name": "buy"}]), [2])
