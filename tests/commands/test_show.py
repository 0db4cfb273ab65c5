"""`compass show` prints the samples that its options select."""

import json

import pytest

from compass_jax.commands.cli import main


def sample(text, reward, outcome="ok", truncated=False, **components):
    fields = {"response": text, "reward": reward, "outcome": outcome, "tokens": len(text)}
    return {**fields, "truncated": truncated, **({"components": components} if components else {})}


@pytest.fixture
def run(tmp_path):
    rows = [
        ("sums", "1+1?", [sample("two", 1.0), sample("three", 0.0)]),
        ("sums", "2+2?", [sample("five", 0.25, length=0.5), sample("six", 0.25)]),
        (
            "words",
            "say[/bold] it",
            [
                sample("it " * 9, 0.5, truncated=True),
                sample("?", 9, "crash") | {"error": "the worker died"},
            ],
        ),
    ]
    with open(tmp_path / "rollouts.jsonl", "w") as file:
        for step in (1, 2):
            for label, prompt, samples in rows:
                row = {"stage": "rl", "step": step, "label": label, "prompt": prompt}
                file.write(json.dumps({**row, "answer": "2", "samples": samples}) + "\n")
        file.write('{"stage": "rl", "st')  # killed
    return str(tmp_path)


SELECTIONS = {
    "all": (
        [],
        ["two", "three", "five", "six", "say[/bold] it", "no verdict (crash: the worker died)"],
        [],
    ),
    "best": (["--best", "--most", "1"], ["two", "reward 1"], ["three", "five"]),
    "worst": (["--worst", "--most", "1"], ["three", "reward 0"], ["two", "five"]),
    "truncated": (["--truncated"], ["it it it", ", truncated"], ["two", "five"]),
    "varied": (["--varied"], ["two", "three"], ["five", "it it"]),
    "label": (["--label", "words"], ["say[/bold] it"], ["two"]),
    "step": (["--step", "1", "--best"], ["step 1: 3 logged groups"], ["step 2"]),
    "components": (["--label", "sums"], ["reward 0.25, length 0.5, 4 tokens"], []),
}


@pytest.mark.parametrize("selection", list(SELECTIONS))
def test_what_is_asked_for_is_shown(run, capsys, selection):
    words, present, absent = SELECTIONS[selection]
    assert main(["show", run, *words]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in present) and not any(text in out for text in absent)


BAD = {
    "step": (["--step", "9"], "--step 9: logged are 1 to 2"),
    "no groups": (["--most", "0"], "--most 0: must be positive"),
    "label": (["--label", "maths"], "--label maths: the labels of step 2 are sums, words"),
}


@pytest.mark.parametrize("bad", list(BAD))
def test_what_is_not_there_is_named(run, capsys, bad):
    words, message = BAD[bad]
    assert main(["show", run, *words]) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("choice", ["best", "worst", "varied", "truncated"])
def test_without_a_verdict_there_is_no_best_or_worst_to_show(tmp_path, capsys, choice):
    row = {"stage": "rl", "step": 1, "label": "x", "prompt": "1+1?"}
    row["samples"] = [sample("two", 0.0, "error")]
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["show", str(tmp_path), f"--{choice}"]) == 0
    message = "none of them is truncated" if choice == "truncated" else "no sample has a reward"
    assert capsys.readouterr().out.splitlines()[-1] == message


def test_no_run_and_a_damaged_line_are_named(run, tmp_path, capsys):
    assert main(["show", str(tmp_path / "none")]) == 2
    assert "is not the directory of an RL run" in capsys.readouterr().err
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1}\n')
    assert main(["show", run]) == 2
    assert "rollouts.jsonl, line 1: it is damaged" in capsys.readouterr().err
