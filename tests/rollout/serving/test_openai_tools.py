"""Tools over HTTP with OpenAI's client: the tools that a request may offer, the calls of an answer,
complete and streamed, and a conversation that continues with their results.
"""

import json
import sys
import time
from pathlib import Path

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stub import TINY, TOKENIZER, Scripted, offered, running

from compass_jax.base.chat.base import any_format
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rollout.serving.errors import ApiError
from compass_jax.rollout.serving.openai_bodies import ChatBody
from compass_jax.rollout.serving.openai_requests import read_job
from compass_jax.rollout.serving.openai_tools import AnswerStream


def tool(name, *parameters):
    properties = {x: {"type": "string"} for x in parameters}
    schema = {"type": "object", "properties": properties}
    function = {"name": name, "description": "what it does", "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [tool("weather", "city", "days"), tool("add", "a", "b"), tool("now")]
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SUM = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "</tool_call>"}}</tool_call>'
CALLS_PARIS = [("weather", {"city": "Paris"})]

# text, thought, content, calls
ANSWERS = [(text, "", *parts) for text, *parts in [
    ("It is sunny.", "It is sunny.", []),
    ("", "", []),
    (PARIS, "", CALLS_PARIS),
    (f"Let me look.\n\n{PARIS}", "Let me look.", CALLS_PARIS),
    (f"{PARIS}\n{SUM}", "", [*CALLS_PARIS, ("add", {"a": 1, "b": "</tool_call>"})]),
    (f"One.\n{PARIS}\nTwo.", "One.\nTwo.", CALLS_PARIS),
    ('{"name": "add", "arguments": {"a": 1}}', "", [("add", {"a": 1})]),
    ('[{"name": "add", "arguments": "{\\"a\\": 1}"}, {"name": "now"}]', "",
     [("add", {"a": 1}), ("now", {})]),
    ('{"answer": {"name": "add"}}', '{"answer": {"name": "add"}}', []),
    ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("[add(1, b='x'), now()]", "", [("add", {"a": 1, "b": "x"}), ("now", {})]),
    ("add(1, 2, 3)", "add(1, 2, 3)", []),  # more arguments than the function has parameters
    ("print(1)", "print(1)", []),
    ("f(x) is a function.", "f(x) is a function.", []),
    ('Here:\n```json\n{"name": "now", "arguments": {}}\n```', "Here:", [("now", {})]),
    ("```python\nprint(1)\n```", "```python\nprint(1)\n```", []),
    ('[TOOL_CALLS][{"name": "now", "arguments": {}}]', "", [("now", {})]),
    ('<tool_call>{"name": "serach", "arguments": {"é": "ü"}}</tool_call>', "",
     [("serach", {"é": "ü"})]),
    ("<tool_call>{not JSON}</tool_call>", "<tool_call>{not JSON}</tool_call>", []),
    ('<tool_call>{"name": "add", "argum', '<tool_call>{"name": "add", "argum', []),
    ("a < b and <tool", "a < b and <tool", []),
    ("  spaces  kept  ", "  spaces  kept  ", []),
]] + [
    (f"<think>\n{SUM} or ```x```?\n</think>\n\n{PARIS}", f"{SUM} or ```x```?", "", CALLS_PARIS),
    (f"<think>{PARIS}</think>No.", PARIS, "No.", []),
    (f"<think>{PARIS}", PARIS, "", []),
    ('<think>\nx\n</think>\n{"name": "now"}', "x", "", [("now", {})]),
    ("<think>a</think>\nb <think>c</think>d\n", "a\nc", "b d\n", []),
    ("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>4",
     "so", "4", []),
    (' to=functions.now<|channel|>commentary json<|message|>{}', "", "", [("now", {})]),
    ("[TOOL_CALLS]weather[ARGS]{\"city\": \"Paris\"}", "", "", CALLS_PARIS),
    ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>42</arg_value>\n</tool_call>",
     "", "", [("weather", {"city": "42"})]),
]  # fmt: skip


def plain(calls):
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    functions = [call["function"] for call in calls]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def pushed(texts, opened="", tools=TOOLS):
    """Returns the parts that a stream of these texts gives, one for each of them and the end."""
    stream = AnswerStream(any_format(), opened, tools)
    return [stream.push(text, False)[0] for text in texts] + [stream.push("", True)[0]]


@pytest.mark.parametrize(("text", "thought", "content", "calls"), ANSWERS)
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_an_answer_in_pieces_is_parted_into_thought_content_and_calls(
    text, thought, content, calls, size
):
    parts = pushed(text[start : start + size] for start in range(0, len(text), size))
    assert "".join(part.thought for part in parts) == thought
    assert "".join(part.content for part in parts) == content
    assert [part.calls for part in parts[:-1]] == [[]] * (len(parts) - 1)
    assert plain(parts[-1].calls) == calls


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_an_answer_may_begin_in_the_thought_that_the_prompt_opened(size):
    text = f"so {SUM}\n</think>\n\nI look.\n{PARIS}"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    parts = pushed(pieces, "<think>\n")
    assert "".join(part.thought for part in parts) == f"so {SUM}"
    assert "".join(part.content for part in parts) == "I look."
    assert plain(parts[-1].calls) == CALLS_PARIS


def test_without_tools_calls_are_text():
    for text in (PARIS, f"Well.\n{PARIS}", '[{"name": "now"}]'):
        parts = pushed([text], tools=[])
        assert "".join(part.content for part in parts) == text and not parts[-1].calls


def test_prose_leaves_before_the_call_and_nothing_of_the_call_does():
    looks = pushed(["Let me look", " it up.\n<to", "ol_call>{"])
    assert [part.content for part in looks[:-1]] == ["Let me look", " it up.", ""]
    thinks = pushed(["<think>I try ```", "a``` no.</think>Well", ", yes"])
    assert [part.thought for part in thinks[:-1]] == ["I try ```", "a``` no.", ""]
    assert [part.content for part in thinks[:-1]] == ["", "", "Well, yes"]


def test_a_long_answer_is_parted_in_linear_time():
    start = time.process_time()
    for unit in ("word ", "<think>a</think>b ", "`", "\n", "<", "[", "<tool_call>"):
        text = unit * (100_000 // len(unit))
        pushed(text[at : at + 4] for at in range(0, len(text), 4))
    assert time.process_time() - start < 10


class Template:
    """A tokenizer that records the arguments of its chat template."""

    longest = TOKENIZER.longest
    encode = TOKENIZER.encode

    def encode_prompt(self, messages, tools=None, **variables):
        self.messages, self.tools, self.variables = messages, tools, variables
        return [1]


def tools_of(**fields):
    """Returns the tools that reach the template of a request with these fields."""
    template = Template()
    body = {"messages": [USER], **fields}
    read_job(json.dumps(body).encode(), ChatBody, offered(template, 4096))
    return template.tools


USER = {"role": "user", "content": "What is the weather in Paris?"}


def bare(**function):
    return [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("body", "param", "expected"),
    [
        ({"tools": {}}, "tools", "tools = {}: must be a valid list"),
        ({"tools": [{}]}, "tools", "tools[0].type is missing"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type = 'web_search'"),
        ({"tools": [{**tool("f"), "x": 1}]}, "tools", "tools[0].x is not supported"),
        ({"tools": [tool("")]}, "tools", "tools[0].function.name = ''"),
        ({"tools": [tool("a b")]}, "tools", "function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools", "more than once"),
        ({"tools": [tool(f"f{n}") for n in range(129)]}, "tools", "at most 128 items"),
        ({"tools": bare(name="f", parameters=[])}, "tools", "function.parameters = []: must be"),
        ({"tools": bare(name="f", code="x")}, "tools", "function.code is not supported"),
        ({"tools": bare(name="f", strict=True)}, "tools", "strict = True"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "cannot force a call"),
        ({"tools": TOOLS, "tool_choice": TOOLS[2]}, "tool_choice", "cannot force a call"),
        ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls", "leave it out"),
    ],
)
def test_what_is_no_tool_is_refused_by_name(body, param, expected):
    with pytest.raises(ApiError) as caught:
        tools_of(**body)
    assert caught.value.param == param and expected in str(caught.value)
    assert len(str(caught.value)) < 400


def test_tools_reach_the_template_without_empty_fields():
    assert tools_of(tools=bare(name="f", description=None, strict=False)) == bare(name="f")
    default = bare(name="f", parameters={"properties": {"x": {"default": None}}})
    assert tools_of(tools=default) == default
    assert tools_of(tools=TOOLS, tool_choice="auto") == TOOLS
    assert tools_of(tools=TOOLS, tool_choice="none") == []
    assert tools_of(tools=None) == tools_of() == []


TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %}{{ m.tool_call_id }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Yields (the batcher, whose text a test sets; a client of OpenAI)."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for file in TINY.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    batcher = Scripted()
    with (
        running(batcher, served=offered(Tokenizer.load(folder))) as port,
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
        ) as openai_client,
    ):
        yield batcher, openai_client


@pytest.fixture
def client(server):
    return server[1]


@pytest.fixture
def says(server):
    """Returns a function that sets the model's text and returns the list of prompts that it will
    receive, as text.
    """
    batcher, _ = server

    def let(text, finish="stop"):
        batcher.text, batcher.finish, batcher.prompts = text, finish, []
        return batcher.prompts

    return let


def ask(client, **fields):
    body = {"model": "tiny", "messages": [USER], "tools": TOOLS, **fields}
    return client.chat.completions.create(**body)


def test_a_client_is_given_the_calls_and_goes_on_with_their_results(client, says):
    prompts = says(f"Let me look.\n{PARIS}\n{SUM}")
    (choice,) = ask(client).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    assert plain([x.model_dump() for x in choice.message.tool_calls]) == [
        *CALLS_PARIS,
        ("add", {"a": 1, "b": "</tool_call>"}),
    ]
    assert all(json.dumps(one["function"]["name"]) in prompts[0] for one in TOOLS)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {i}"}
        for i, call in enumerate(choice.message.tool_calls)
    ]
    next_prompts = says("It is sunny.")
    reply = choice.message.model_dump()
    (last,) = ask(client, messages=[USER, reply, *results]).choices
    assert (last.message.content, last.finish_reason) == ("It is sunny.", "stop")
    assert last.message.tool_calls is None
    assert "result 0" in next_prompts[0] and "result 1" in next_prompts[0]
    assert '"arguments": {"city": "Paris"}' in next_prompts[0], "arguments are an object there"


def test_a_stream_brings_the_same_calls(client, says):
    says(f"Let me look.\n{PARIS}\n{SUM}")
    content, calls, reasons = "", {}, []
    for event in ask(client, stream=True):
        (choice,) = event.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert call.index not in calls
            calls[call.index] = call.model_dump()
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert content == "Let me look." and reasons == ["tool_calls"]
    assert [name for name, _ in plain([calls[i] for i in sorted(calls)])] == ["weather", "add"]


def test_an_answer_that_was_cut_says_so(client, says):
    says(PARIS[:30], finish="length")
    (choice,) = ask(client).choices
    assert (choice.finish_reason, choice.message.content) == ("length", PARIS[:30])
    says(PARIS, finish="length")
    (choice,) = ask(client).choices
    assert choice.finish_reason == "length" and len(choice.message.tool_calls) == 1


def test_without_tools_or_with_tool_choice_none_a_call_is_text(client, says):
    prompts = says(PARIS)
    for fields in ({"tool_choice": "none"}, {"tools": openai.omit}):
        (choice,) = ask(client, **fields).choices
        assert (choice.message.content, choice.message.tool_calls) == (PARIS, None)
        assert choice.finish_reason == "stop"
    assert not any("what it does" in prompt for prompt in prompts)


def test_several_choices_have_calls_of_their_own(client, says):
    says(PARIS)
    choices = ask(client, n=2).choices
    assert [len(choice.message.tool_calls) for choice in choices] == [1, 1]
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 2


def test_variables_of_the_template(client):
    template = Template()
    variables = {"enable_thinking": False, "depth": {"a": [1]}}
    body = {"messages": [USER], "tools": TOOLS, "chat_template_kwargs": variables}
    read_job(json.dumps(body).encode(), ChatBody, offered(template))
    assert (template.tools, template.variables) == (TOOLS, variables)
    for bad in ({"messages": []}, {"tools": []}, {"x": "<|im_end|>"}, {"x": "y" * 10**5}, 3):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, extra_body={"chat_template_kwargs": bad})
        assert caught.value.body["param"] == "chat_template_kwargs"
