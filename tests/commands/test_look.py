"""`compass data` shows what the model will see and judges the ground truths."""

import dataclasses
import io
import json

from rich.console import Console
from tiny_run import tiny_run

from compass_jax.commands.look import histogram, run_look
from compass_jax.config import DataConfig, FileSource


def looked(tmp_path, rows, **source):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (FileSource(str(tmp_path / "p.jsonl"), **source),)
    config = tiny_run("odd_verifiers:coin")
    data = DataConfig(sources, tokenizer=config.data.tokenizer, heldout_frac=0.3, eval_prompts=4)
    console = Console(file=io.StringIO(), width=80)
    return run_look(dataclasses.replace(config, data=data), 1, console), console.file.getvalue()


ROWS = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(30)]


def test_prompts_are_shown_with_their_control_tokens_and_ground_truths_are_right(tmp_path):
    share, text = looked(tmp_path, ROWS)
    assert share == 1.0 and "their own verifier finds right: " in text
    assert "<|im_start|>assistant" in text and "as the model reads them:" in text
    assert "training: " in text and "held out: 4 prompts" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_ground_truth_that_no_answer_could_match_is_named(tmp_path):
    (tmp_path / "never.py").write_text("def score(row, response):\n    return 0.0\n")
    share, text = looked(tmp_path, ROWS, verifier=str(tmp_path / "never.py:score"))
    assert share == 0.0 and "not right (reward 0): " in text and "rewards.right_at" in text


def test_the_histogram_counts_every_prompt_once():
    lines = histogram([1, 16, 17, 40, 99], (16, 32))
    assert lines[0] == "tokens: shortest 1, median 17, longest 99"
    assert [line.split("█")[0].split() for line in lines[1:]] == [
        ["up", "to", "16", "2"],
        ["up", "to", "32", "1"],
        ["longer", "2", "than", "rollout.prompt_buckets[-1]", "=", "32"],
    ]
