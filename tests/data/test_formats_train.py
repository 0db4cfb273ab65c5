"""Files of every kind as they are: SFT learns from all of them, RL goes on with all of them, and a
file of its own is evaluated on.
"""

import dataclasses
import json

from test_formats import write
from tiny_run import tiny_run

from compass_jax.config import FileSource, LogConfig
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft

KINDS = {
    "verl.parquet": lambda q, a: {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": q}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": a},
        "extra_info": {"split": "train", "index": 0, "answer": a, "question": q},
    },
    "trl.jsonl": lambda q, a: {"prompt": q, "completion": a},
    "trl_chat.parquet": lambda q, a: {
        "prompt": [{"role": "user", "content": q}],
        "completion": [{"role": "assistant", "content": a}],
    },
    "sharegpt.jsonl": lambda q, a: {
        "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]
    },
    "gsm8k.jsonl": lambda q, a: {"question": q, "answer": f"It is so.\n#### {a}"},
    "openai.jsonl": lambda q, a: {
        "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
    },
}


def test_sft_and_rl_run_two_steps_on_files_of_every_kind(tmp_path, capsys):
    files = []
    for i, (name, made) in enumerate(KINDS.items()):
        rows = [made(f"{10 * i + n} + 0?", str(10 * i + n)) for n in range(4)]
        files.append(write(tmp_path / name, [*rows, made(f"{i} " * 60, "9")]))
    test = write(
        tmp_path / "test.jsonl", [KINDS["gsm8k.jsonl"](f"{n} + 0?", f"{n}") for n in (3, 90)]
    )
    config = tiny_run()
    sft = dataclasses.replace(config.sft, files=tuple(files), procedural=(), steps=2)
    data = dataclasses.replace(
        config.data,
        sources=tuple(FileSource(path) for path in files),
        eval_sources=(FileSource(test, label="held"),),
    )
    rl = dataclasses.replace(config.rl, prompts_per_step=12, group_size=2, eval_every=2)
    config = dataclasses.replace(config, data=data, sft=sft, rl=rl, log=LogConfig(groups=12))
    first = dataclasses.replace(config, run_dir=str(tmp_path / "sft"))
    run_sft(first)
    said = capsys.readouterr()
    said = " ".join((said.out + said.err).split())
    assert said.count("verl.parquet: verl rows: prompt, extra_info.answer") == 1
    assert "6 SFT examples are longer than sft.buckets[-1] = 104 tokens and are left out" in said
    assert "1 SFT examples ask a held-out question and are left out" in said
    run_rl(dataclasses.replace(config, run_dir=str(tmp_path / "rl"), init_from=first.run_dir))
    said = capsys.readouterr()
    said = " ".join((said.out + said.err).split())
    for kind, columns in (
        ("verl", "verl.parquet: verl rows: prompt, reward_model.ground_truth"),
        ("TRL", "trl.jsonl: TRL rows: prompt, completion"),
        ("chat", "trl_chat.parquet: TRL rows: prompt, completion"),
        ("ShareGPT", "sharegpt.jsonl: ShareGPT rows: conversations"),
        ("GSM8K", "gsm8k.jsonl: GSM8K rows: question, answer"),
        ("OpenAI", "openai.jsonl: OpenAI rows: messages"),
    ):
        assert said.count(columns) == 1, kind
    assert "1 of 30 training questions are in data.eval_sources too; they are left out" in said
    assert "6 of 29 prompts are longer than rollout.prompt_buckets[-1] = 40 tokens" in said
    groups = [json.loads(x) for x in (tmp_path / "rl" / "rollouts.jsonl").read_text().splitlines()]
    assert {group["label"] for group in groups} == {name.rpartition(".")[0] for name in KINDS}
    for group in groups:
        assert group["prompt"] == f"{group['answer']} + 0?"
    steps = [json.loads(x) for x in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["metrics"]["reward/unknown_frac"] == 0 for step in steps)
    assert "eval/held/avg_at_k" in steps[1]["metrics"]
