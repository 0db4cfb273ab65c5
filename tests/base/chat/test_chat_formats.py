"""Each format reads back what its family's template writes: thought, content and calls by value.
The texts come from the templates of tests/chat_templates and, in renderers.json, from the package
renderers.
"""

import json
from itertools import product
from pathlib import Path

import pytest
from published_templates import FAMILIES, write_folder

from compass_jax.base.chat.base import ChatFormat, any_format, chat_formats
from compass_jax.commands.trial import Trial, judged
from compass_jax.config import ConfigError, DataConfig, FileSource, RewardConfig
from compass_jax.config.chat import find_format
from compass_jax.data.chat_detection import unread_turns, with_chat_format
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError
from compass_jax.rewards.checks import code_of

RENDERED = json.loads((Path(__file__).parent / "renderers.json").read_text())["families"]
QUESTION = {"role": "user", "content": "How is it?"}
THOUGHT, CONTENT, ANSWER = "Let me think.\nTwice.", "I will look.", "It is **13**.\n\nDone."
WEATHER = {"city": "Paris", "days": 2, "place": {"lat": 1.5, "tags": ["a b", True, None]}}
CLOCK = {"zone": "42"}
TEXTS = ("city", "zone")  # arguments that are texts
FORMAT = {  # the format of each published template
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_2507", "qwen3_2507_thinking"), "hermes"),
    **dict.fromkeys(("deepseek_v3", "deepseek_r1"), "deepseek"),
    **{"llama3_1": "llama", "mistral": "mistral", "gpt_oss": "gpt_oss", "glm_4_5": "glm"},
}
FORMAT_OF_RENDERER = {
    **dict.fromkeys(("qwen3", "qwen3-vl"), "hermes"),
    **dict.fromkeys(("qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3"), "qwen3_coder"),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), "qwen3_coder"),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), "glm"),
    **dict.fromkeys(("laguna-xs.2", "laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1"), "glm"),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), "deepseek"),
    **dict.fromkeys(("kimi-k2", "kimi-k2.5"), "kimi"),
    **{"deepseek-v4": "deepseek_dsml", "minimax-m2": "minimax", "llama-3": "llama"},
}
FRAMES = ("</assistant>", "\n")  # what a template writes around a turn, besides its end token


def call(number, name, arguments):
    return {
        "type": "function",
        "id": f"call{number:05}",
        "function": {"name": name, "arguments": arguments},
    }


CALLS = [call(0, "weather", WEATHER), call(1, "clock", CLOCK)]


def tool(name, arguments):
    kinds = {str: "string", int: "integer", dict: "object"}
    properties = {
        key: {"type": kinds[type(x)], "description": "so"} for key, x in arguments.items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": name, "description": "does so", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("weather", WEATHER), tool("clock", CLOCK)]


def read_calls(message):
    assert not message.malformed
    calls = [call.with_texts(TEXTS) for call in message.calls]
    return [(call.name, call.arguments) for call in calls]


def content_without_calls(message):
    bare = message.bare
    return message.content[: bare.begin] if bare.calls else message.content


# ---- rendered by the templates -------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    return {
        name: Tokenizer.load(write_folder(folder / name, name), {"enable_thinking": True})
        for name in FAMILIES
    }


def test_the_format_is_detected_by_what_the_template_writes(tokenizers):
    assert {name: x.chat_format.name for name, x in tokenizers.items()} == FORMAT


def turn_read(tokenizer, message, tools):
    """Returns the turn that the tokens of a rendered message mean, as a rollout's text is read."""
    prompt = tokenizer.encode_chat([QUESTION], tools=tools)
    tokens = tokenizer.encode_chat([QUESTION, message], add_generation_prompt=False, tools=tools)
    ends = [i for i, token in enumerate(tokens) if token in tokenizer.end_ids]
    begins = tokens[: len(prompt)] == prompt
    last = next((i for i in ends if i >= len(prompt)), len(tokens)) if begins else len(tokens)
    text = tokenizer.decode_response(tokens[len(prompt) if begins else 0 : last])
    if not begins:  # R1's template opens a thought in the prompt alone
        return tokenizer.chat_format.read(text.rpartition("<｜Assistant｜>")[2])
    return tokenizer.chat_format.read(tokenizer.opened_thought(prompt) + text)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("thinks", "speaks", "count"), [*product((0, 1), (0, 1), (0, 1, 2))])
def test_a_template_s_turn_is_read_back(tokenizers, name, thinks, speaks, count):
    """A part that the template refuses or leaves out is not compared."""
    tokenizer = tokenizers[name]
    message = {"role": "assistant", "content": CONTENT * speaks}
    message |= {"tool_calls": CALLS[:count]} if count else {}
    message |= {"reasoning_content": THOUGHT} if thinks else {}
    tools = TOOLS[:count]
    try:
        read = turn_read(tokenizer, message, tools)
    except TokenizerError:
        pytest.skip("the template refuses this turn")
    calls = [(x["function"]["name"], x["function"]["arguments"]) for x in CALLS[:count]]
    if name == "gpt_oss":
        calls = calls[:1]  # its template writes a single call
        if count and speaks:
            assert (read.thought, read.content, read_calls(read)) == (CONTENT, "", calls)
            return
    assert read_calls(read) == calls and not read.cut and not read.unknown_marks
    shown = speaks and not (count and name in ("mistral", "llama3_1"))
    assert content_without_calls(read).rpartition(">")[2].strip() == CONTENT * bool(shown)
    if thinks and name.startswith(("qwen3_2507_thinking", "glm")):
        assert read.thought == THOUGHT


@pytest.mark.parametrize("name", ["qwen3", "qwen3_2507_thinking", "glm_4_5", "gpt_oss"])
def test_a_template_s_thought_is_read_back(tokenizers, name):
    message = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    read = turn_read(tokenizers[name], message, [])
    assert (read.thought, read.content, read.calls) == (THOUGHT, ANSWER, [])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokenizer_s_end_tokens_are_the_format_s(tokenizers, name):
    tokenizer, family = tokenizers[name], FAMILIES[name]
    ends = {tokenizer.decode([token], special=True) for token in tokenizer.end_ids}
    assert ends == {family.end, *family.ends} <= set(tokenizer.chat_format.ends)


# ---- rendered by the package renderers -----------------------------------------------------------

TURNS = [(name, kind) for name, family in RENDERED.items() for kind in family["turns"]]


@pytest.mark.parametrize(("name", "kind"), TURNS)
@pytest.mark.parametrize("known", [True, False])
def test_a_rendered_turn_is_read_back(name, kind, known):
    """The texts are those of renderers 0.1.12, which has no thought where a family drops it."""
    chat_format = chat_formats()[FORMAT_OF_RENDERER[name]] if known else any_format()
    prompt, text = RENDERED[name]["turns"][kind]
    for end in (*RENDERED[name]["stops"], *FRAMES):
        text = text.removesuffix("\n").removesuffix(end)
    read = chat_format.read(chat_format.opened(prompt) + text)
    calls = [("weather", WEATHER), ("clock", CLOCK)][: {"answer": 0, "one": 1}.get(kind, 2)]
    assert read_calls(read) == calls and not read.unknown_marks and not read.cut
    assert content_without_calls(read) == {"both": CONTENT, "answer": ANSWER}.get(kind, "")
    thinks = THOUGHT.split()[0] in text and kind != "calls"
    assert read.thought == (THOUGHT if thinks else "")


def test_each_renderer_s_stop_tokens_are_the_format_s():
    for name, family in RENDERED.items():
        ends = set(chat_formats()[FORMAT_OF_RENDERER[name]].ends)
        assert ends & set(family["stops"]) or name.startswith("laguna"), name


# ---- written from the families' documentation ----------------------------------------------------

DOCUMENTED = [
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
     "</function>\n</tool_call>"),
    ("qwen3_coder", "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
     '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
     '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>'),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}'),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]9Ae3bDc2F[ARGS]{"city": "Paris"}'),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "a"}]'),
    ("llama", '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}'),
    ("llama", '<|python_tag|>weather.call(city="Paris")'),
    ("llama", '<function=weather>{"city": "Paris"}</function>'),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
     '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'),
    ("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]'),
    ("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]<|/tool_call|>'),
    ("nemotron", '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Paris"}}]</TOOLCALL>'),
    ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters":'
     ' {"city": "Paris"}}]<|END_ACTION|>'),
    ("seed", "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>"
     "\n</seed:tool_call>"),
    ("minimax", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris'
     "</parameter>\n</invoke>\n</minimax:tool_call>"),
    ("gpt_oss", "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
     '{"city": "Paris"}<|call|>'),
    ("gpt_oss", " to=functions.weather<|channel|>commentary json<|message|>"
     '{"city": "Paris"}'),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
     "</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), DOCUMENTED)
@pytest.mark.parametrize("before", ["", "<think>\nf(x=1)\n</think>\n\n"])
def test_a_documented_call_is_read(name, text, before):
    for chat_format in (find_format(name), any_format()):
        read = chat_format.read(before + text)
        assert read_calls(read) == [("weather", {"city": "Paris"})]
        assert not read.content and read.text.strip() and not read.unknown_marks


@pytest.mark.parametrize(("name", "text"), DOCUMENTED)
def test_a_call_that_is_cut_off_is_malformed_or_none(name, text):
    """Whatever is left of it, no call of another value is read."""
    for end in range(len(text)):
        read = find_format(name).read("So: " + text[:end])
        calls = [] if read.malformed else read_calls(read)
        programs = [x for x in calls if x[0] == "code_interpreter"]  # what <|python_tag|> begins
        assert calls in ([], programs, [("weather", {"city": "Paris"})])


THOUGHTS = [
    ("hermes", "<think>\n{}\n</think>\n\n{}"),
    ("mistral", "[THINK]{}[/THINK]{}"),
    ("seed", "<seed:think>{}</seed:think>{}"),
    ("cohere", "<|START_THINKING|>{}<|END_THINKING|><|START_RESPONSE|>{}<|END_RESPONSE|>"),
    ("gpt_oss", "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final"
     "<|message|>{}"),
    ("gpt_oss", "<|channel|>commentary<|message|>{}<|end|><|start|>assistant<|channel|>final"
     "<|message|>{}<|return|>"),
    ("hermes", "<reasoning>\n{}\n</reasoning>\n{}"),
    ("hermes", "<thinking>{}</thinking>{}"),
    ("<plan>...</plan>", "<plan>{}</plan>{}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "form"), THOUGHTS)
def test_a_documented_thought_is_read(name, form):
    read = find_format(name).read(form.format(THOUGHT, ANSWER))
    assert (read.thought, read.content, read.text) == (THOUGHT, ANSWER, ANSWER)
    assert not read.cut and not read.unknown_marks
    begun = find_format(name).read(form.format(THOUGHT, "").split(THOUGHT)[0] + THOUGHT)
    assert (begun.thought, begun.content, begun.cut) == (THOUGHT, "", True)


# ---- the setting ---------------------------------------------------------------------------------


def test_the_setting_overrides_the_template_and_wrong_names_are_refused(tmp_path):
    folder = write_folder(tmp_path / "f", "glm_4_5")
    assert with_chat_format(DataConfig(tokenizer=folder)).chat_format == "glm"
    own = DataConfig(tokenizer=folder, chat_format="<plan>...</plan>")
    assert with_chat_format(own) is own
    tokenizer = Tokenizer(folder, chat_format=own.chat_format)
    assert tokenizer.chat_format.read("<plan>a</plan>b").content == "b"
    for name in ("glmm", "<plan>", "...", "<plan></plan>"):
        with pytest.raises(ConfigError, match=r"data.chat_format = .*there is no such format"):
            DataConfig(chat_format=name).validate()


OF_FILE = """
from compass_jax.base.chat.base import ChatFormat

FORMAT = ChatFormat("plan", own_thoughts=(("<plan>", "</plan>"),))
"""


def test_a_format_of_a_user_s_file_is_taken_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "plan.py").write_text(OF_FILE)
    monkeypatch.chdir(tmp_path)
    folder = write_folder(tmp_path / "f", "glm_4_5")
    data = DataConfig(tokenizer=folder, chat_format="plan.py:FORMAT").validate()
    assert data.chat_format == f"{tmp_path}/plan.py:FORMAT" and with_chat_format(data) is data
    assert dict(code_of(data)).keys() == {data.chat_format}
    monkeypatch.chdir(folder)
    read = Tokenizer(folder, chat_format=data.chat_format).chat_format.read("<plan>a</plan>b")
    assert (read.thought, read.content) == ("a", "b")
    for name, message in (
        ("plan.py:FROMAT", "did you mean FORMAT"),
        ("plan.py:ChatFormat", "it is a type; make it a compass_jax.base.chat.base.ChatFormat"),
    ):
        with pytest.raises(ConfigError, match=f"data.chat_format = .*{message}"):
            DataConfig(chat_format=f"{tmp_path}/{name}").validate()


def test_a_sandboxed_worker_reads_answers_by_a_format_of_a_user_s_file(tmp_path):
    (tmp_path / "plan.py").write_text(OF_FILE)
    source = FileSource("rows.jsonl", verifier="exact")
    trial = Trial(source, {"answer": "4"}, "", ["<plan>5</plan>4"], "")
    for name, reward in (("any", 0), (f"{tmp_path}/plan.py:FORMAT", 1)):
        (score,) = judged(trial._replace(chat_format=name), RewardConfig(answer_tag="", workers=1))
        assert score.known and score.reward == reward


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_that_a_format_does_not_read_back_are_named(tmp_path, name):
    folder = write_folder(tmp_path, name)
    assert unread_turns(chat_formats()[FORMAT[name]], folder, {"enable_thinking": True}) == []
    if name == "gpt_oss":
        faults = unread_turns(ChatFormat("tags alone"), folder)
        assert any("<|channel|>analysis<|message|>a thought" in text for text in faults)
        assert any("to=functions.weather" in text for text in faults)


def test_a_template_without_known_marks_gives_the_format_that_reads_all(tmp_path):
    folder = write_folder(tmp_path / "f", "qwen2_5")
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "f" / "chat_template.jinja").write_text(plain)
    assert Tokenizer.load(folder).chat_format is any_format()
