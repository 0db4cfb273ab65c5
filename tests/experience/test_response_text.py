"""The text of a response in rewards and logs: special tokens are kept, and a thought that the
prompt opens begins with its tag.
"""

import json
from functools import partial

import numpy as np
import pytest
from published_templates import END, FAMILIES, write_folder
from tiny_run import tiny_run

from compass_jax.base.records import GIVEN, Prompt, Rollout
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.experience.evaluate import turns_of
from compass_jax.rewards.verifiers.kinds.texts import form

QUESTION = [{"role": "user", "content": "1 + 1?"}]
FORMED = "<think>\nso\n</think>\n\n<answer>2</answer>"


def special_thoughts(folder):
    """Returns Qwen3's tokenizer with its thought tags as special tokens."""
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    for token in raw["added_tokens"]:
        token["special"] = token["special"] or token["content"] in ("<think>", "</think>")
    path.write_text(json.dumps(raw))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    return {name: write_folder(folder / name, name) for name in FAMILIES}


def rollout_of(prompt, *stretches, turns=0):
    """Returns a sample of the model's turns, with the environment's messages between them."""
    parts = [np.asarray(prompt, np.int32), *(np.asarray(part, np.int32) for part in stretches)]
    versions = [
        np.full(len(part), GIVEN if n and n % 2 == 0 else 3) for n, part in enumerate(parts)
    ]
    tokens, zeros = np.concatenate(parts), np.zeros(sum(map(len, parts)), np.float32)
    question = Prompt(1, 0, "x", "q", parts[0], "", turns=turns)
    return Rollout(question, 0, tokens, zeros, zeros, False, np.concatenate(versions), 0)


def test_special_tokens_are_kept_and_those_that_end_begin_or_pad_are_not(tmp_path):
    write_folder(tmp_path, "qwen3")
    tokenizer = special_thoughts(tmp_path)
    ids = [0, 1, *tokenizer.encode("<think>a</think>b<|im_start|>"), END, 0, 0]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode_response(ids) == "<think>a</think>b<|im_start|>"
    rollout = rollout_of(tokenizer.encode_prompt(QUESTION), tokenizer.encode(FORMED + "<|im_end|>"))
    text = turns_of(tokenizer, tiny_run().rollout).text(rollout)
    assert text == FORMED and form(text, "answer") == 1.0


@pytest.mark.parametrize("name", ["qwen3_2507_thinking", "deepseek_r1"])
def test_a_thought_that_the_prompt_opens_begins_with_its_tag(folders, name):
    tokenizer = Tokenizer.load(folders[name])
    turns = turns_of(tokenizer, tiny_run().rollout)
    answer = tokenizer.encode(FORMED.removeprefix("<think>\n"))
    rollout = rollout_of(tokenizer.encode_prompt(QUESTION), [*answer, END])
    assert turns.text(rollout) == turns.response(rollout) == FORMED
    assert form(turns.text(rollout), "answer") == 1.0
    cut = rollout_of(tokenizer.encode_prompt(QUESTION), answer[:3])
    assert turns.text(cut).startswith("<think>\nso")


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "mistral", "gpt_oss", "glm_4_5"])
def test_other_prompts_open_none(folders, name):
    tokenizer = Tokenizer.load(folders[name])
    turns = turns_of(tokenizer, tiny_run().rollout)
    rollout = rollout_of(tokenizer.encode_prompt(QUESTION), [*tokenizer.encode("2"), END])
    assert turns.text(rollout) == "2"


def test_a_closed_thought_and_one_that_the_question_spells_open_none(folders):
    tokenizer = Tokenizer.load(folders["qwen3"], {"enable_thinking": False})
    turns = turns_of(tokenizer, tiny_run().rollout)
    messages = [{"role": "user", "content": "What is <think>"}]
    for prompt in (tokenizer.encode_prompt(QUESTION), tokenizer.encode_prompt(messages)):
        assert turns.text(rollout_of(prompt, [*tokenizer.encode("2"), END])) == "2"


def test_each_turn_begins_with_the_thought_that_is_opened_before_it(folders):
    tokenizer = Tokenizer.load(folders["qwen3_2507_thinking"])
    turns = turns_of(tokenizer, tiny_run().rollout)
    encode_reply = partial(turns.encode, json.dumps([{"role": "tool", "content": "7"}]))
    first = [*tokenizer.encode("a</think>b"), END]
    rollout = rollout_of(
        tokenizer.encode_prompt(QUESTION),
        first,
        encode_reply(first),
        tokenizer.encode("c"),
        turns=3,
    )
    assert json.loads(turns.text(rollout)) == ["<think>\na</think>b", "<think>\nc"]


def test_a_thought_that_is_learnt_has_the_special_tokens_of_one_that_is_sampled(tmp_path):
    write_folder(tmp_path, "qwen3")
    tokenizer = special_thoughts(tmp_path)
    thought = {"role": "assistant", "content": FORMED}
    tokens, mask = tokenizer.encode_example([*QUESTION, thought])
    opening, closing = (tokenizer.encode(tag) for tag in ("<think>", "</think>"))
    assert len(opening) == len(closing) == 1
    learnt = tokens[mask].tolist()
    assert learnt.count(opening[0]) == learnt.count(closing[0]) == 1
    spelled = tokenizer.encode_prompt([{"role": "user", "content": "<|im_end|>"}])
    assert spelled.count(END) == 1, "a control token that a message spells is text"
