"""`compass data` shows the prompts that the model will see, and judges the ground truths."""

import dataclasses
import io
import json
import re

from published_templates import write_folder
from rich.console import Console
from tiny_run import tiny_run

from compass_jax.commands.look import histogram, run_look
from compass_jax.config import DataConfig, FileSource, RewardConfig


def looked(tmp_path, rows, **source):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (FileSource(str(tmp_path / "p.jsonl"), **source),)
    config = tiny_run("odd_verifiers:coin")
    data = DataConfig(sources, tokenizer=config.data.tokenizer, heldout_frac=0.3, eval_prompts=4)
    console = Console(file=io.StringIO(), width=80)
    config = dataclasses.replace(config, data=data, rewards=RewardConfig())
    return run_look(config.model.vocab_size, config.scored, 1, console), console.file.getvalue()


ROWS = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(30)]


def test_prompts_are_shown_with_their_control_tokens_and_ground_truths_are_right(tmp_path):
    share, text = looked(tmp_path, ROWS)
    assert share == 1.0 and "their own verifier finds right: " in text
    assert "<|im_start|>assistant" in text and "as the model reads them:" in text
    assert "training: " in text and "held out: 4 prompts" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_ground_truth_in_a_published_form_is_answered_as_a_model_would_write_it(tmp_path):
    """Skywork-OR1's list as JSON text, and Search-R1's targets."""
    skywork = [{**row, "answer": json.dumps([row["answer"]])} for row in ROWS]
    search = [{**row, "answer": {"target": [row["answer"], "none"]}} for row in ROWS]
    for rows, verifier in ((skywork, "math"), (search, "exact"), (skywork, "numeric")):
        share, text = looked(tmp_path, rows, verifier=verifier)
        assert share == 1.0 and re.search(r"^ *truth +\d+$", text, re.MULTILINE), text


def test_a_ground_truth_that_no_answer_could_match_is_named(tmp_path):
    (tmp_path / "never.py").write_text("def score(row, response):\n    return 0.0\n")
    share, text = looked(tmp_path, ROWS, verifier=str(tmp_path / "never.py:score"))
    assert share == 0.0 and "finds right: 0 of " in text and "look at the verifier" in text


def test_prompts_without_a_ground_truth_are_counted_beside_those_that_are_judged(tmp_path):
    """The first row has no ground truth, so that the column is not required of the other rows."""
    (tmp_path / "mine.py").write_text("def score(answer, response):\n    return 1.0\n")
    rows = [row if n % 2 else {"prompt": row["prompt"]} for n, row in enumerate(ROWS)]
    share, text = looked(tmp_path, rows, verifier=str(tmp_path / "mine.py:score"))
    without, every = map(int, re.search(r"(\d+) of (\d+) prompts have no ground", text).groups())
    right = every - without
    assert share == 1.0 and without and f"finds right: {right} of {right}" in text


GRADED = "def score(row, response):\n    return 0.6\n"
HALF = "def score(weight, response):\n    return float(weight)\n"


def test_a_graded_reward_is_shown_with_the_response_and_the_bar(tmp_path):
    (tmp_path / "graded.py").write_text(GRADED)
    share, text = looked(tmp_path, ROWS, verifier=str(tmp_path / "graded.py:score"))
    notice = "not right: reward 0.6, below rewards.right_at = 1, for the response '<answer>"
    assert share == 0.0 and notice in text


def test_answers_without_a_verdict_are_counted_apart_with_the_reason(tmp_path):
    """Half of the rows lack a column that the reward takes; the second reward returns None."""
    (tmp_path / "half.py").write_text(HALF)
    rows = [{**row, **({"weight": 1} if n % 2 else {})} for n, row in enumerate(ROWS)]
    share, text = looked(tmp_path, rows, verifier=str(tmp_path / "half.py:score"))
    match = re.search(r"(\d+) of (\d+) answers have no verdict: (.*)", text)
    lost, every = int(match[1]), int(match[2])
    place = f"score ({tmp_path / 'half.py'}, line "
    assert 0 < lost < every and match[3].startswith(place)
    assert "takes 'weight', and the row has no such column" in match[3]
    assert share == 1.0 and f"finds right: {every - lost} of {every - lost}" in text
    (tmp_path / "none.py").write_text("def score(response):\n    pass\n")
    share, text = looked(tmp_path, ROWS, verifier=str(tmp_path / "none.py:score"))
    assert share is None and "answers have no verdict: unjudged: a verifier returned" in text
    assert "finds right" not in text


def test_the_histogram_counts_every_prompt_once():
    lines = histogram([1, 16, 17, 40, 99], (16, 32))
    assert lines[0] == "tokens: shortest 1, median 17, longest 99"
    assert [line.split("█")[0].split() for line in lines[1:]] == [
        ["up", "to", "16", "2"],
        ["up", "to", "32", "1"],
        ["longer", "2", "than", "rollout.prompt_buckets[-1]", "=", "32"],
    ]


def test_the_prompts_are_shown_as_template_args_make_them(tmp_path):
    """Qwen3's template closes the thought where enable_thinking is false."""
    folder = write_folder(tmp_path / "tokenizer", "qwen3")
    base = tiny_run()
    data = dataclasses.replace(base.data, tokenizer=folder)
    args = {"enable_thinking": False}
    closed = []
    for changed in (data, dataclasses.replace(data, template_args=args)):
        out = io.StringIO()
        config = dataclasses.replace(base, data=changed)
        run_look(config.model.vocab_size, config.scored, console=Console(file=out, width=100))
        closed.append("</think>" in out.getvalue())
    assert closed == [False, True]
