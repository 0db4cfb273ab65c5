"""Conversations of several turns in the published chat templates: the text between turns, and the
text that SFT learns of each turn.
"""

import json

import pytest
from published_templates import END, FAMILIES, write_folder

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.turns import turn_encoder
from compass_jax.data.vocabulary import TokenizerError

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        },
    },
}
ASKED = {"role": "user", "content": "1 + 1?"}
AGAIN = {"role": "user", "content": "Again."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "name": "add", "content": "7"}
QWEN = "<|im_start|>assistant\n"
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n"
# the text that follows the model's end token, for a tool's reply and for a user's
BETWEEN = {
    "qwen2_5": (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n" + QWEN,
        "\n<|im_start|>user\nAgain.<|im_end|>\n" + QWEN,
    ),
    "llama3_1": (
        LLAMA.format("ipython") + '"7"<|eot_id|>' + LLAMA.format("assistant"),
        LLAMA.format("user") + "Again.<|eot_id|>" + LLAMA.format("assistant"),
    ),
    "gpt_oss": (
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
        '"7"<|end|><|start|>assistant',
        "<|start|>user<|message|>Again.<|end|><|start|>assistant",
    ),
    "glm_4_5": (
        "<|observation|>\n<tool_response>\n7\n</tool_response><|assistant|>",
        "<|user|>\nAgain.<|assistant|>",
    ),
    "deepseek_v3": (
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>7<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        "<｜User｜>Again.<｜Assistant｜>",
    ),
}
BETWEEN["qwen3"] = BETWEEN["qwen3_2507"] = BETWEEN["qwen2_5"]
BETWEEN["qwen3_2507_thinking"] = tuple(text + "<think>\n" for text in BETWEEN["qwen2_5"])
BETWEEN["deepseek_r1"] = (BETWEEN["deepseek_v3"][0], "<｜User｜>Again.<｜Assistant｜><think>\n")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    return {name: Tokenizer.load(write_folder(folder / name, name)) for name in FAMILIES}


def reply(tokenizer, *messages, turn=(50, END)):
    return turn_encoder(tokenizer)(json.dumps(messages), turn)


@pytest.mark.parametrize("name", BETWEEN)
def test_between_turns_stands_what_the_template_writes_after_the_end_token(tokenizers, name):
    tokenizer = tokenizers[name]
    texts = [tokenizer.decode(reply(tokenizer, one), special=True) for one in (RESULT, AGAIN)]
    assert texts == list(BETWEEN[name])


def test_mistral_s_results_have_an_id_of_nine_characters(tokenizers):
    tokenizer = tokenizers["mistral"]
    text = tokenizer.decode(reply(tokenizer, {**RESULT, "tool_call_id": "abcdef012"}), special=True)
    assert text == '[TOOL_RESULTS] {"content": 7, "call_id": "abcdef012"}[/TOOL_RESULTS]'
    generated = tokenizer.decode(reply(tokenizer, RESULT), special=True)
    assert len(generated) == len(text)
    assert tokenizer.decode(reply(tokenizer, AGAIN), special=True) == "[INST] Again.[/INST]"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("replies", [[RESULT, AGAIN], [RESULT, {**RESULT, "content": "8"}]])
def test_several_messages_of_an_environment_are_all_there(tokenizers, name, replies):
    text = tokenizers[name].decode(reply(tokenizers[name], *replies), special=True)
    last = "Again." if replies[1] is AGAIN else "8"
    assert 0 <= text.index("7") < text.rindex(last)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_that_spells_the_end_token_is_text(tokenizers, name):
    tokenizer = tokenizers[name]
    plain = reply(tokenizer, {"role": "tool", "content": "x"})
    spelled = reply(tokenizer, {"role": "tool", "content": FAMILIES[name].end})
    assert spelled.count(END) == plain.count(END) and len(spelled) > len(plain)


def test_the_end_token_that_was_sampled_is_not_written_twice(tokenizers):
    """GLM's turns end with the token that opens the next message."""
    tokenizer = tokenizers["glm_4_5"]
    full_reply = reply(tokenizer, RESULT)
    assert reply(tokenizer, RESULT, turn=(50, full_reply[0])) == full_reply[1:]
    assert full_reply[0] in tokenizer.end_ids
    (user, *_) = reply(tokenizer, AGAIN)
    assert reply(tokenizer, RESULT, turn=(50, user)) == full_reply, "another end token stays"


def test_a_message_that_the_template_moves_or_drops_is_refused(tokenizers):
    """DeepSeek's templates write every system message at the beginning."""
    for name in ("deepseek_v3", "deepseek_r1"):
        with pytest.raises(TokenizerError, match=r"does not show the system message 'Be brief\.'"):
            reply(tokenizers[name], AGAIN, {"role": "system", "content": "Be brief."})
    with pytest.raises(TokenizerError, match="roles must alternate"):
        reply(tokenizers["mistral"], {"role": "system", "content": "Be brief."})


def test_the_name_of_a_called_tool_is_read_from_the_turn(tokenizers):
    tokenizer = tokenizers["gpt_oss"]
    turn = tokenizer.encode('<|channel|>commentary to=functions.sum <|message|>{"a": 1}<|call|>')
    text = tokenizer.decode(reply(tokenizer, {"role": "tool", "content": "7"}, turn=turn), True)
    assert text.startswith("<|start|>functions.sum to=assistant")


# ---- supervised fine-tuning ----------------------------------------------------------------------

SAID = {"role": "assistant", "content": "2"}
THOUGHT = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\n2"}
TALKS = {
    "four turns": [ASKED, SAID, AGAIN, {"role": "assistant", "content": "3"}],
    "call": [ASKED, CALL, RESULT, SAID],
    "call, and on": [
        {"role": "system", "content": "Be brief."},
        *(ASKED, CALL, RESULT, SAID),
        *(AGAIN, CALL, {**RESULT, "content": "8"}, {"role": "assistant", "content": "3"}),
    ],
    "thoughts": [ASKED, THOUGHT, AGAIN, THOUGHT],
}


def spans(tokenizer, example):
    """Returns the token spans that an example learns."""
    tokens, mask = (part.tolist() for part in example)
    learnt_spans, inside = [], False
    for token, learnt in zip(tokens, mask, strict=True):
        if learnt and not inside:
            learnt_spans.append([])
        if learnt:
            learnt_spans[-1].append(token)
        inside = learnt
    return learnt_spans


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("talk", TALKS)
def test_every_assistant_turn_is_learnt_after_the_prompt_that_a_rollout_has(tokenizers, name, talk):
    tokenizer, messages = tokenizers[name], TALKS[talk]
    tools = [TOOL] if FAMILIES[name].tools else []
    parts = tokenizer.encode_turns(messages, tools)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    learnt = [span for part in parts for span in spans(tokenizer, part)]
    assert len(learnt) == len(turns)
    for span, i in zip(learnt, turns, strict=True):
        assert span[-1] in tokenizer.end_ids and not set(tokenizer.end_ids).intersection(span[:-1])
        text = tokenizer.decode(span, special=True)
        if messages[i].get("tool_calls"):
            assert "add" in text and "1" in text
        else:
            assert messages[i]["content"].rpartition("\n")[2] in text
    prompts = [tokenizer.encode_prompt(messages[:i], tools) for i in turns]
    for tokens, mask in parts:
        assert tokens[: mask.tolist().index(True)].tolist() in prompts, "each part opens so"


def test_thoughts_are_learnt_where_the_prompt_opens_them(tokenizers):
    for name in ("qwen3_2507_thinking", "deepseek_r1"):
        tokenizer = tokenizers[name]
        parts = tokenizer.encode_turns(TALKS["thoughts"])
        texts = [tokenizer.decode(span) for part in parts for span in spans(tokenizer, part)]
        assert texts == ["why\n</think>\n\n2"] * 2
        parts = tokenizer.encode_turns(TALKS["four turns"])
        texts = [tokenizer.decode(span) for part in parts for span in spans(tokenizer, part)]
        assert texts == ["\n</think>\n\n2", "\n</think>\n\n3"]


KEEPS_LAST = """{%- for message in messages %}
{%- set content = message.content if loop.last else message.content.split('</think>')[-1] %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""


@pytest.mark.parametrize(
    ("content", "learnt"),
    [
        ("<think>why</think>2", "why</think>2"),
        ("<think>\nwhy\n</think>\n\n2", "why\n</think>\n\n2"),
        ("why</think>2", "why</think>2"),
        ("2", "\n</think>\n\n2"),
    ],
)
def test_a_thought_that_the_template_keeps_is_learnt_once(tmp_path, content, learnt):
    """As QwQ's: the prompt opens a thought, and the last message's content is written whole."""
    folder = write_folder(tmp_path, "qwen3")
    (tmp_path / "chat_template.jinja").write_text(KEEPS_LAST)
    tokenizer = Tokenizer.load(folder)
    parts = tokenizer.encode_turns([ASKED, {"role": "assistant", "content": content}])
    (span,) = spans(tokenizer, parts[0])
    assert tokenizer.decode(span) == learnt


def test_conversations_stay_one_sequence_where_the_template_rewrites_nothing(tokenizers):
    for name in ("qwen2_5", "qwen3_2507", "llama3_1", "glm_4_5", "deepseek_v3"):
        tokens, mask = tokenizers[name].encode_example(TALKS["four turns"])
        assert mask.sum() > 2 and len(tokens) == len(mask)
    for name in ("qwen3", "gpt_oss"):
        with pytest.raises(TokenizerError, match=r"messages\[3\].*differently"):
            tokenizers[name].encode_example(TALKS["four turns"])


def test_reasoning_before_calls_stays_in_the_context_of_the_answer(tokenizers):
    """gpt-oss's template drops the reasoning before a final answer; a rollout has it in context."""
    tokenizer = tokenizers["gpt_oss"]
    talk = [ASKED, {**CALL, "reasoning_content": "hm"}, RESULT, SAID]
    parts = tokenizer.encode_turns(talk)
    text = tokenizer.decode(parts[-1][0], special=True)
    assert "analysis<|message|>hm<|end|>" in text
    assert text.endswith("<|channel|>final<|message|>2<|return|>")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "change",
    [
        lambda function: {"function": function},
        lambda function: {"function": {**function, "arguments": json.dumps({"a": 1})}},
        lambda function: function,
        lambda function: {"id": "call_Abcdefghijklmnop", "type": "function", "function": function},
    ],
    ids=["bare", "arguments as text", "Hermes", "OpenAI's id"],
)
def test_calls_are_rendered_alike_however_a_row_writes_them(tokenizers, name, change):
    tokenizer = tokenizers[name]
    call = change(CALL["tool_calls"][0]["function"])
    answer = {**RESULT, "tool_call_id": call["id"]} if "id" in call else RESULT
    talk = [ASKED, {**CALL, "tool_calls": [call]}, answer]
    texts = [tokenizer.render(one) for one in (talk, [ASKED, CALL, RESULT])]
    if name == "mistral":  # its template shows the ids
        texts = [text[: text.index('"id"')] for text in texts]
    assert texts[0] == texts[1]
