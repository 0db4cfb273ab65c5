"""Tools and calls of tools reach the chat template, or the conversation is refused."""

import json
import shutil

import pytest
from tiny_run import TOKENIZER

from compass_jax.config import DataConfig, FileSource
from compass_jax.data.files import DataError
from compass_jax.data.messages import check_messages
from compass_jax.data.prompts import train_prompts
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError

SHOWS = (
    "{% for t in tools %}[{{ t.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.name }}{{ m.content }}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALK = [
    {"role": "user", "content": "1 + 1?", "name": "Al"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "x"},
]


def with_template(folder, template):
    shutil.copytree(TOKENIZER, folder)
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder)


def test_a_row_s_tools_and_calls_are_in_the_prompt(tmp_path):
    tokenizer = with_template(tmp_path / "shows", SHOWS)
    rows = [{"prompt": TALK, "answer": "2", "tools": [{"name": "add"}], "domain": "sums"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(rows[0]) + "\n")
    data = DataConfig(sources=(FileSource(str(path)),), heldout_frac=0.0)
    (prompt,) = train_prompts(data, tokenizer, 0)
    text = tokenizer.decode(prompt.tokens)
    assert text == f"[add]<user>Al1 + 1?<assistant>{json.dumps(CALL)}<tool>2"
    assert prompt.labels == ("domain/sums",)


@pytest.mark.parametrize(
    ("template", "field"),
    [
        (SHOWS.replace("m.tool_calls", "[]"), "the tool_calls"),
        (SHOWS.replace("m.name", "''"), "the name"),
    ],
)
def test_what_the_template_passes_over_is_refused(tmp_path, template, field):
    tokenizer = with_template(tmp_path / "passes_over", template)
    messages = check_messages(TALK, "here")
    with pytest.raises(TokenizerError, match=f"does not show {field} of these messages"):
        tokenizer.encode_chat(messages, tools=[{"name": "add"}])


def test_tools_that_the_template_passes_over_are_told_of_once(tmp_path, caplog):
    """The prompt then lacks the tools, as in transformers: DeepSeek's templates show none."""
    tokenizer = with_template(tmp_path / "passes_over", "{{ messages[0].content }}<|im_end|>")
    messages, tools = [{"role": "user", "content": "1 + 1?"}], [{"name": "add"}]
    prompts = [tokenizer.encode_chat(messages, tools=tools) for _ in range(3)]
    assert prompts == [tokenizer.encode_chat(messages)] * 3
    (record,) = caplog.records
    assert "does not show the tools of these messages" in record.message
    with pytest.raises(TokenizerError, match="does not show the tools"):
        tokenizer.render(messages, tools)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "robot", "content": "x"}, "has the role 'robot'; known roles: system"),
        ({"role": "user", "content": [{"type": "image"}]}, "a list of parts for content .images"),
        ({"role": "user", "content": "x", "image": "a.png"}, "has 'image': role, content"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "only the assistant calls tools"),
        ({"role": "assistant", "tool_calls": ["add"]}, "tool_calls: must be a list of objects"),
        ({"role": "user", "content": "x", "name": 3}, "has name = 3: it must be text"),
    ],
)
def test_a_message_that_cannot_be_used_is_refused_with_its_place(message, error):
    with pytest.raises(DataError, match=rf"^here: messages\[0\].*{error}"):
        check_messages([message], "here")
