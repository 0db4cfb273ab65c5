"""No verifier pays for a thought or a call, in the form of any family, wherever the text ends."""

import json
import logging
import time
from dataclasses import replace

import numpy as np
import pytest
from published_templates import END, write_folder

from compass_jax.base.chat.base import UnknownMarks, any_format, chat_formats
from compass_jax.base.records import Prompt
from compass_jax.config import DataConfig, FileSource, RewardConfig
from compass_jax.config.chat import find_format
from compass_jax.config.kinds import kinds
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rewards.checks import Check, build
from compass_jax.rewards.judges.judging import compared
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.environment import Environment, Turn
from compass_jax.rewards.tasks.rows import encode_row

# a program is started by fork and exec, and jax warns about the fork if an earlier test started it
pytestmark = pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")

K = kinds()
PROGRAM = "Try\n```python\ndef double(x):\n    return 2*x\n```\nhm"
TESTS = ["assert double(2) == 4"]
# verifier, the arguments of a row, a thought that would be right, an answer that is wrong
PAID = [
    ("math", {"answer": "12"}, r"Perhaps \boxed{12}.", "It is 13."),
    ("math", {"answer": "12"}, "The answer is 12.", "I cannot say."),
    ("numeric", {"answer": "12"}, "<answer>12</answer>", "<answer>13</answer>"),
    ("exact", {"answer": "Paris"}, "<answer>Paris</answer>", "Rome."),
    ("choice", {"answer": "B", "options": ["x", "y"]}, "The answer is B.", "No idea."),
    ("code", {"tests": TESTS}, PROGRAM, "I cannot do it."),
    ("regex", {"pattern": r"\bParis\b"}, "Paris!", "Rome."),
    ("verdict", {"answer": "Tie"}, "Tie", "Neither is said."),
    ("json", {"answer": '{"a": 1}'}, '```json\n{"a": 1}\n```', "no"),
    ("tools", {"answer": [{"name": "f", "arguments": {}}]},
     '<tool_call>{"name": "f"}</tool_call>', "None is needed."),
    ("instructions", {"instruction_id_list": ["keywords:existence"],
                      "kwargs": [{"keywords": ["Paris"]}]}, "Paris!", "Rome."),
]  # fmt: skip
FORMS = {
    "think": "<think>{}</think>{}",
    "opened by the prompt": "{}\n</think>\n\n{}",
    "gpt-oss analysis": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final"
    "<|message|>{}",
    "gpt-oss commentary": "<|channel|>commentary<|message|>{}<|end|><|start|>assistant<|channel|>"
    "final<|message|>{}<|return|>",
    "Magistral": "[THINK]{}[/THINK]{}",
    "Seed-OSS": "<seed:think>{}</seed:think>{}",
    "Command A": "<|START_THINKING|>{}<|END_THINKING|><|START_RESPONSE|>{}<|END_RESPONSE|>",
    "prompted": "<reasoning>\n{}\n</reasoning>\n{}",
    "nested": "<think>a <think>{}</think> b</think>{}",
    "two marks": "<think>[THINK]{}</think>{}",
    "twice": "<think>so</think><think>{}</think>{}",
}


def judged(name, response, row, **options):
    value = K[name].judge(response=response, answer_tag="answer", **row, **options) if name not in (
        "regex", "verdict", "instructions"
    ) else K[name].judge(response=response, **row, **options)  # fmt: skip
    return value["reward"] if isinstance(value, dict) else value


@pytest.mark.parametrize(("name", "row", "thought", "answer"), PAID)
def test_a_thought_is_not_paid_in_any_form(name, row, thought, answer):
    assert judged(name, thought, row) == 1, "the text without a mark is right"
    for form, text in FORMS.items():
        assert judged(name, text.format(thought, answer), row) == 0, form
        cut = text.partition("{}")[0] + thought
        if form != "opened by the prompt":  # nothing tells that text from an answer
            assert judged(name, cut, row) == 0, f"{form}, cut off"
        assert judged(name, text.format("Hm.", thought), row) == 1, form


def test_the_listed_inputs_of_fault_one():
    code = "<think>Try\n```python\ndef double(x):\n    return 2*x\n```\nhm</think> I cannot do it."
    check = build(Check("code"), "answer")
    assert check({"tests": TESTS}, code).reward == 0
    assert check({"tests": TESTS}, code.partition("</think>")[0]).reward == 0
    text = (r"<|channel|>analysis<|message|>Perhaps \boxed{12}.<|end|><|start|>assistant<|channel|>"
            "final<|message|>It is 13.")  # fmt: skip
    for response in (text, text.partition("<|end|>")[0], text[: text.index("13")]):
        assert judged("math", response, {"answer": "12"}) == 0
    assert judged("math", text.replace("It is 13", "The answer is 12"), {"answer": "12"}) == 1


CALL_FORMS = [
    '<tool_call>{{"name": "f", "arguments": {{"a": {0}}}}}</tool_call>',
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{1}</arg_value>\n</tool_call>",
    "<tool_call>\n<function=f>\n<parameter=a>\n{1}\n</parameter>\n</function>\n</tool_call>",
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{{"a": {0}}}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    '[TOOL_CALLS]f[ARGS]{{"a": {0}}}',
    '<|channel|>commentary to=functions.f<|message|>{{"a": {0}}}',
]


@pytest.mark.parametrize("form", CALL_FORMS)
def test_what_a_call_says_is_no_answer_wherever_it_is_cut(form):
    said = r"\boxed{12} "
    call = form.format(json.dumps(said), said)
    for end in range(len(call) + 1):
        assert judged("math", "<think>so</think>" + call[:end], {"answer": "12"}) in (0, None)


@pytest.mark.parametrize("form", FORMS.values())
def test_a_text_that_is_cut_anywhere_is_never_paid(form):
    text = form.format(r"so \boxed{12} it is", "I do not know.") + "\n" + CALL_FORMS[0].format(1, 1)
    begins = form.startswith("{}")
    for end in range(len(text) + 1):
        part = text[:end]
        if begins and "</think>" not in part:
            part = "<think>" + part  # as a rollout's text begins
        assert judged("math", part, {"answer": "12"}) == 0, part
        read = any_format().read(part)
        assert isinstance(read.calls, list) and r"\boxed{12}" not in read.content


HOSTILE = (
    *("<think>", "</think>", "<think></think>", "[THINK]</think>", "<|channel|>", "<|message|>"),
    *("<|start|><|message|>", "<|channel|>analysis<|message|>", "to=functions.f<|message|>{"),
    *("<tool_call>", "<tool_call>{", '<tool_call>{"a":"', "<tool_call>f<arg_key>"),
    *("<function=f>", "<function=f><parameter=a>", "<invoke name=", "<minimax:tool_call>"),
    *("[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]{", "<｜tool▁calls▁begin｜>", "<|python_tag|>f("),
    *(
        "<|tool_calls_section_begin|>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        "```json\n",
        "<think>f(",
    ),
    *("<", "</", "<|", "[/", "\n", " ", "assistant ", "<think></think>[{}, ", "f(x=1)</think>"),
    '<tool_call>{"name": "f"}</tool_call>',
    "<seed:think><reasoning></seed:think>",
    '<think></think>f(a="<tool_call>")\n',
)


@pytest.mark.parametrize("unit", HOSTILE)
def test_hostile_texts_are_read_in_linear_time_without_an_exception(unit):
    text = (unit * 100_000)[:100_000]
    start = time.process_time()
    for variant in (text, text + "</think>", "<think>" + text):
        message = any_format().read(variant)
        assert isinstance(message.calls, list) and isinstance(message.unknown_marks, tuple)
    assert time.process_time() - start < 3


# ---- the setting reaches every reader ------------------------------------------------------------

OWN = "<plan>...</plan>"


def test_the_format_reaches_the_workers_the_votes_and_the_judge(caplog):
    row = {"answer": "12"}
    text = r"<plan>\boxed{12}</plan>It is \boxed{13}."
    assert judged("math", r"<plan>\boxed{12}</plan> 13", row) == 1, "any does not know these marks"
    data = DataConfig(sources=(FileSource("rows.jsonl"),), chat_format=OWN)
    prompt = Prompt(0, 0, "", "q", np.zeros(1, np.int32), "12", encode_row(row))
    with Scorer(RewardConfig(workers=1, sandbox="off"), data) as scorer:
        scorer.submit(0, prompt, r"<plan>\boxed{12}</plan> 13")
        scorer.submit(1, prompt, text.replace("13", "12"))
        scores = dict(scorer.collect(block=True))
        while len(scores) < 2:
            scores |= dict(scorer.collect(block=True))
    assert (scores[0].reward, scores[1].reward) == (0.0, 1.0)
    anchored = replace(prompt, row=encode_row({"a": "x"}))
    assert compared(anchored, text, "a", OWN)[0] == r"It is \boxed{13}."


def test_marks_of_an_unknown_form_are_said_once_a_run(caplog):
    notice = UnknownMarks(find_format("any"))
    texts = ["<|channel>thought\nso<channel|>4", "<think:opensource>so</think:opensource>4"]
    with caplog.at_level(logging.WARNING):
        for text in [*texts, *texts, "4", "<think>so</think>4", "a < b and [x] <answer>4</answer>"]:
            notice.note(text)
    assert [x.levelno for x in caplog.records] == [logging.WARNING] * 2
    assert "'<|channel>'" in caplog.text and "'<think:opensource>'" in caplog.text
    assert "data.chat_format" in caplog.text


@pytest.mark.parametrize("text", ["[antithetically]", "f[args]", "[called]", "[RECALL]", "<a> <b>"])
def test_a_word_in_brackets_is_no_mark(text):
    assert not find_format("hermes").read(text).unknown_marks


def test_the_beginning_of_another_message_is_no_unknown_mark():
    text = "4<|im_start|>user\n5 + 5<|im_end|>"
    assert not find_format("any").read(text).unknown_marks
    assert find_format("any").read("4<|im_star|>").unknown_marks == ("<|im_star|>",)


def test_a_scorer_says_unknown_marks_once(caplog):
    data = DataConfig(sources=(FileSource("rows.jsonl"),), chat_format="hermes")
    prompt = Prompt(0, 0, "", "q", np.zeros(1, np.int32), "4", encode_row({"answer": "4"}))
    with caplog.at_level(logging.WARNING), Scorer(RewardConfig(workers=1), data) as scorer:
        for n in range(3):
            scorer.submit(n, prompt, "[THINK]so[/THINK]4")
        scores = {}
        while len(scores) < 3:
            scores |= dict(scorer.collect(block=True))
    said = [x for x in caplog.records if "[THINK]" in x.getMessage()]
    assert len(said) == 1 and "mistral" in said[0].getMessage()


def test_a_response_of_gpt_oss_reaches_verifiers_with_its_channels(tmp_path):
    tokenizer = Tokenizer.load(write_folder(tmp_path / "f", "gpt_oss"))
    text = (r"<|channel|>analysis<|message|>\boxed{12}<|end|><|start|>assistant<|channel|>final"
            r"<|message|>\boxed{13}")  # fmt: skip
    decoded = tokenizer.decode_response([*tokenizer.encode(text), END])
    assert decoded == text and tokenizer.chat_format.read(decoded).content == r"\boxed{13}"
    calls = tokenizer.encode('<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>')
    (call,) = tokenizer.chat_format.read(tokenizer.decode_response(calls)).calls
    assert (call.name, call.arguments) == ("f", {"a": 1})


@pytest.mark.parametrize("name", ["deepseek_v3", "mistral", "glm_4_5", "qwen3"])
def test_calls_reach_verifiers_with_their_marks(tmp_path, name):
    tokenizer = Tokenizer.load(write_folder(tmp_path / "f", name))
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": "a" * 9, "function": {"name": "f", "arguments": {"a": "b"}}}
        ],
    }
    question = {"role": "user", "content": "?"}
    tokens = tokenizer.encode_chat([question, message], add_generation_prompt=False)
    prompt = tokenizer.encode_chat([question])
    response = tokenizer.decode_response(tokens[len(prompt) :])
    verdict = K["tools"].judge(response, [{"name": "f", "arguments": {"a": "b"}}], "answer")
    assert verdict["reward"] == 1 and judged("math", response, {"answer": "b"}) == 0


def test_an_environment_gets_the_message_in_the_model_s_form():
    def step(state, text, message):
        state.append((text, message.thought, message.content, [x.name for x in message.calls]))
        return Turn(reward=float(bool(message.calls)))

    environment = Environment(lambda row: [], step)
    text = "<plan>so</plan>[TOOL_CALLS]f[ARGS]{}"
    assert environment({}, json.dumps([text]), OWN)["reward"] == 1
    assert environment({}, json.dumps(["<plan>so</plan>"]), OWN)["reward"] == 0
    assert environment.play({}, ["<think>a</think>b"])[0].reward == 0


def test_the_argument_of_a_call_without_quotes_is_of_the_reference_s_type():
    glm = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
    for value, text, reward in [("42", "42", 1), (42, "42", 1), (42, "43", 0), ("x y", "x y", 1),
                                ([1], "[1]", 1), ({"b": None}, '{"b": null}', 1)]:  # fmt: skip
        reference = [{"name": "f", "arguments": {"a": value}}]
        assert K["tools"].judge(glm.format(text), reference, "answer")["reward"] == reward


def test_every_format_has_a_name_and_marks_by_which_it_is_found():
    for name, chat_format in chat_formats().items():
        assert chat_format.name == name and chat_format.own_marks
        assert find_format(name) is chat_format
