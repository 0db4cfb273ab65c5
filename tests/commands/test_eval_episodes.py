"""`compass eval` plays episodes: of an environment with a folder's weights, and of the held-out
rows of a run.
"""

import dataclasses
import json
from pathlib import Path

import pytest
from served import MODEL, TOKENIZER, parameters

from compass_jax.commands.cli import main
from compass_jax.weights.hf import save_params

COUNTING = Path(__file__).parents[1] / "experience" / "episodes" / "counting.py"
SMALL = ["--evaluation.k", "2", "--rollout.max-new-tokens", "96", "--rollout.slots", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "tiny"
    config = dataclasses.replace(MODEL, max_positions=1024)
    save_params(parameters(), config, folder, "float32", tokenizer_from=TOKENIZER)
    return str(folder)


def evaluated(model, env, out, *words):
    """Returns the held-out set of summary.json, and the rows of answers.jsonl."""
    command = ["eval", "--env", f"{COUNTING}:{env}", "--checkpoint", model, "--out", str(out)]
    assert main([*command, *SMALL, *words]) == 0
    summary = json.loads((out / "summary.json").read_text())["sets"]["heldout"]
    return summary, [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]


def test_every_row_has_k_episodes_and_a_greedy_one(model, tmp_path, capsys):
    summary, rows = evaluated(model, "Counting", tmp_path / "out", "--rewards.right-at", "1")
    assert (summary["prompts"], summary["k"], summary["unscored"]) == (12, 2, 0)
    assert {row["prompt"] for row in rows} == {f"Count to {n}." for n in range(12)}
    rewards = [[x["reward"] for x in row["samples"]] for row in rows]
    assert {len(x) for x in rewards} == {3}
    assert summary["avg_at_k"] == pytest.approx(sum(sum(x[:2]) for x in rewards) / 24)
    assert summary["pass_at"]["2"] == pytest.approx(sum(1.0 in x[:2] for x in rewards) / 12)
    assert summary["greedy"] == pytest.approx(sum(x[2] for x in rewards) / 12)
    assert all(x["episode"]["turns"] and x["parts"] for row in rows for x in row["samples"])
    text = capsys.readouterr().out
    assert "avg@2" in text and "pass@2" in text and "check failed: 0;" in text
    assert (tmp_path / "out" / "drivers").is_dir()


def test_a_dry_run_counts_the_rows(model, capsys):
    command = ["eval", "--env", f"{COUNTING}:Counting", "--checkpoint", model, "--dry-run"]
    assert main([*command, *SMALL]) == 0
    assert "prompts    0 of the training, 12 held out" in capsys.readouterr().out


def test_an_error_is_counted_apart_and_is_no_reward(model, tmp_path, capsys):
    words = ["--data.sources.0.timeout-s", "2"]
    summary, rows = evaluated(model, "Failing", tmp_path / "out", *words)
    samples = [(int(row["prompt"][9:-1]), x) for row in rows for x in row["samples"]]
    lost = [x for n, x in samples if n % 2]
    assert {x["outcome"] for x in lost} == {"error", "timeout"}
    assert all(x["outcome"] == "ok" for n, x in samples if not n % 2)
    counts = {kind: sum(x["outcome"] == kind for x in lost) for kind in ("error", "timeout")}
    assert summary["lost"] == counts and summary["unscored"] == len(lost) == sum(counts.values())
    known = [x["reward"] for row in rows for x in row["samples"][:2] if x["outcome"] == "ok"]
    assert summary["avg_at_k"] == pytest.approx(sum(known) / len(known))
    text = capsys.readouterr().out
    assert (
        f"check failed: {len(lost)} ({counts['error']} error, {counts['timeout']} timeout)" in text
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--checkpoint DIR is missing"),
        (["--checkpoint", "none"], "--checkpoint none: there is no such folder"),
        (["mine.py"], "CONFIG mine.py and --env a.py:A: CONFIG says what is evaluated"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_by_name(capsys, words, message):
    assert main(["eval", *words, "--env", "a.py:A"]) == 2
    assert message in capsys.readouterr().err
