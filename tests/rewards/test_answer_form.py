"""The warning of a run in which no prompt asks for the form in which its verifier looks for the
answer."""

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from tiny_run import tiny_run

from compass_jax.base.records import Prompt
from compass_jax.commands.dry_run import run_dry
from compass_jax.commands.look import run_look
from compass_jax.config import DataConfig, FileSource, ProceduralSource, RewardConfig
from compass_jax.config.kinds import kinds
from compass_jax.rewards.answer_form import missing_requests

PLAIN = "What is 1 + 2?"
FORMS = ["reasoning_gym", *(name for name, kind in kinds().items() if kind.form)]


def prompts_of(*texts):
    """Returns prompts whose tokens are the characters of a text."""
    return [
        Prompt(i, 0, "x", text, np.asarray([*map(ord, text)], np.int32), "3", "{}")
        for i, text in enumerate(texts)
    ]


def lines_of(verifier, *texts, tag="answer", **data):
    base = tiny_run()
    source = ProceduralSource("chain_sum")
    if verifier != "reasoning_gym":
        source = FileSource("a.jsonl", verifier=verifier)
    config = replace(
        base, data=DataConfig(sources=(source,), **data), rewards=RewardConfig(answer_tag=tag)
    )
    decode = lambda tokens: "".join(map(chr, tokens))  # noqa: E731
    return list(
        missing_requests(config.data, config.rewards.answer_tag, prompts_of(*texts), decode)
    )


@pytest.mark.parametrize("verifier", FORMS)
def test_a_plain_question_asks_for_no_form(verifier):
    (line,) = lines_of(verifier, PLAIN, PLAIN)
    assert line.startswith("data.sources[0]: no prompt asks for the form of answer")
    text = re.search(r'set --data\.system-prompt "(.+)"$', line)[1]
    text = text.replace("\\`", "`").replace('\\"', '"')
    assert lines_of(verifier, PLAIN, f"{text}\n{PLAIN}") == [], "the text that is named asks for it"


@pytest.mark.parametrize(
    ("verifier", "text"),
    [
        ("math", "Put your final answer within \\boxed{}."),
        ("math", "Answer in <answer> </answer> tags."),
        ("math", "End with #### and the number."),
        ("choice", "End with: The answer is (X)."),
        ("json", "Reply in JSON."),
        ("code", "Write a Python function that adds."),
        ("code", "def add(a, b):"),
        ("tools", '<tools>{"name": "add"}</tools>'),
        ("format", "Put thoughts in <think>."),
        ({"length": 0.1, "math": 1.0}, "Use \\boxed{}."),
    ],
)
def test_prompts_that_ask_are_not_told_of(verifier, text):
    assert lines_of(verifier, PLAIN, f"{text} {PLAIN}") == []


@pytest.mark.parametrize("verifier", ["length", "regex", "instructions", "my_rewards.py:score"])
def test_verifiers_without_a_form_ask_for_none(verifier):
    assert lines_of(verifier, PLAIN) == []


def test_no_tag_takes_the_whole_response_and_another_tag_is_asked_for():
    assert lines_of("math", PLAIN, tag="") == []
    (line,) = lines_of("math", f"Use <answer>. {PLAIN}", tag="result")
    assert "between <result> and </result>" in line
    (line,) = lines_of("math", PLAIN, system_prompt="Be brief.")
    assert 'add to --data.system-prompt "Think step by step' in line


def test_every_verifier_that_looks_for_an_answer_has_a_form():
    assert {name for name, kind in kinds().items() if kind.looks_for} - set(FORMS) == {"verdict"}


@pytest.mark.parametrize("asks", [False, True])
def test_compass_data_and_dry_run_tell_it(tmp_path, asks):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"What is 1 + {i}?", "answer": str(1 + i)} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_run()
    data = DataConfig(
        (FileSource(str(path)),),
        tokenizer=config.data.tokenizer,
        system_prompt="Write <answer>." if asks else "",
        heldout_frac=0.0,
        eval_prompts=0,
    )
    rollout = replace(config.rollout, prompt_buckets=(256,))
    config = replace(
        config, data=data, rewards=RewardConfig(), rollout=rollout, run_dir=str(tmp_path / "run")
    )
    messages, console = [], Console(file=io.StringIO(), width=200)
    run_dry(config, "filter", tell=messages.append)
    run_look(config.model.vocab_size, config.scored, 1, console)
    for text in ("\n".join(messages), console.file.getvalue()):
        assert ("no prompt asks for the form of answer" in text) != asks
