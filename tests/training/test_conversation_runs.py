"""Runs over conversations with the published chat templates: RL with an environment and tools, and
supervised fine-tuning.
"""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from evolve import evolve
from logged import lines, numbers
from published_templates import END, FAMILIES, VOCAB, write_folder
from tiny_run import tiny_run

from compass_jax.config import DataConfig, SFTConfig, TaskSource
from compass_jax.training import building
from compass_jax.training.loop import StepFailed
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft
from compass_jax.weights import checkpoint

TASK = """
from compass_jax.rewards.tasks import Environment, Task, Turn

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


def prompts(seed):
    for n in range(4):
        yield {"prompt": [{"role": "user", "content": f"Add {n}."}], "tools": [TOOL]}


def step(state, text):
    state.append(text)
    if len(state) == 1:
        return Turn([{"role": "tool", "name": "add", "content": "3"}])
    if len(state) == 2:
        return Turn([{"role": "user", "content": "Again."}])
    return Turn(reward=float(len(text) % 2))


task = Task(prompts, Environment(lambda row: [], step, turns=3))
"""


def rl_config(folder, name):
    (folder / "task.py").write_text(TASK)
    base = tiny_run()
    return evolve(
        base,
        run_dir=str(folder / "runs"),
        model={"vocab_size": VOCAB, "max_positions": 2048},
        rollout={
            "slots": 4,
            "prompt_buckets": (1024,),
            "max_new_tokens": 512,
            "cache_bucket": 1536,
            "tokens_per_call": 8,
        },
        data=DataConfig(
            sources=(TaskSource(f"{folder}/task.py:task"),),
            heldout_frac=0.0,
            eval_prompts=0,
            tokenizer=write_folder(folder / "tokenizer", name),
        ),
        rl={
            "prompts_per_step": 2,
            "group_size": 2,
            "buckets": (1536,),
            "micro_batch_tokens": 1536 * 4,
            "save_every": 0,
        },
    )


@pytest.fixture
def brief(monkeypatch):
    """Changes the initial parameters so that a turn ends with probability 1/5 at every token."""
    real = building.first_parameters

    def first_parameters(init_from, seed, model, tell):
        params = real(init_from, seed, model, tell)
        # all hidden states have a common part, on which the end token's logit depends
        params["embed"] += 3.0
        params["head"] = params["head"].at[:, END].add(0.14)
        return params

    monkeypatch.setattr(building, "first_parameters", first_parameters)


QUICK = ("qwen3", "gpt_oss")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@pytest.mark.parametrize("name", NAMES)
def test_three_turns_with_tools_train(tmp_path, name, brief):
    config = rl_config(tmp_path, name)
    result = run_rl(config)
    assert (result["steps"], result["stopped"]) == (2, False)
    for row in numbers(tmp_path / "runs"):
        assert row["reward/unknown_frac"] == 0 and np.isfinite(row["grad_norm"])
    groups = lines(tmp_path / "runs", "rollouts")
    samples = [sample for group in groups for sample in group["samples"]]
    assert Counter(sample["components"]["turns"] for sample in samples)[3] >= 6
    response = next(x["response"] for x in samples if x["components"]["turns"] == 3)
    assert response.index("3") < response.index("Again.")


TALKS = [
    [("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?"), ("assistant", "4")],
    [("user", "Add 1."), ("call", "1"), ("tool", "2"), ("assistant", "It is 2.")],
]


def message(role, text):
    if role == "call":
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": int(text)}}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"role": role, "content": text}


@pytest.mark.parametrize("name", NAMES)
def test_four_turns_are_learnt(tmp_path, name):
    rows = [{"messages": [message(*turn) for turn in talk]} for talk in TALKS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = rl_config(tmp_path, name)
    data = dataclasses.replace(config.data, sources=())
    sft = SFTConfig(
        files=(str(tmp_path / "rows.jsonl"),),
        steps=2,
        batch=2,
        buckets=(512,),
        micro_batch_tokens=512 * 4,
        optim=config.sft.optim,
    )
    result = run_sft(dataclasses.replace(config, data=data, sft=sft))
    assert result["steps"] == 2 and result["data"]["examples"] == 2
    first, second = numbers(tmp_path / "runs")
    assert 0 < second["sft/loss"] < first["sft/loss"]


REFUSES_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_step_of_failures_alone_stops_the_run_with_the_cause_and_goes_on_once_it_is_mended(
    tmp_path, brief
):
    config = rl_config(tmp_path, "qwen3")
    template = tmp_path / "tokenizer" / "chat_template.jinja"
    template.write_text(REFUSES_TOOLS)
    with pytest.raises(StepFailed, match=r"all 4 samples of a step failed.*no tools here"):
        run_rl(config)
    assert not (tmp_path / "runs" / "metrics.jsonl").exists(), "no step is done"
    assert checkpoint.latest(config.directory) == 0
    template.write_text(REFUSES_TOOLS.replace("{{ raise_exception('no tools here') }}", ""))
    result = run_rl(config)
    assert (result["steps"], result["stopped"]) == (2, False)
    for row in numbers(tmp_path / "runs"):
        assert row["reward/unknown_frac"] == 0
