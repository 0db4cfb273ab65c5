"""`compass eval-judge` asks for a verdict on both orders of every pair, counts the verdicts and
writes them.
"""

import json

import pytest
from judged import quoted, served

from compass_jax.commands.cli import main
from compass_jax.rewards.judges import endpoint

# (candidate, anchor, verdict): the judge below prefers the larger number
PAIRS = [
    ("9", "2", "Better"),
    ("1", "4", "Worse"),
    ("5", "5", "Tie"),
    ("3", "7", "Better"),  # the judge says Worse
    ("first", "8", "Better"),  # the judge favours the candidate in both orders
    ("odd", "6", "Tie"),  # the judge gives no verdict
]


def judge(number, body):
    content = body["messages"][-1]["content"]
    candidate, anchor = quoted(content, "Candidate"), quoted(content, "Anchor")
    if "odd" in (candidate, anchor):
        return "Who knows?"
    if "first" in (candidate, anchor):
        return "I like it.\nBetter"
    return ("Tie", "Better", "Worse")[
        (int(candidate) > int(anchor)) - (int(candidate) < int(anchor))
    ]


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.01)
    path = tmp_path / "pairs.jsonl"
    with path.open("w") as file:
        for candidate, anchor, verdict in PAIRS:
            row = {"prompt": "The larger?", "candidate": candidate, "anchor": anchor}
            file.write(json.dumps(row | {"verdict": verdict}) + "\n")
    return path


def test_shares_and_rulings_are_printed_and_written(pairs, tmp_path, capsys):
    with served(judge) as (at, seen):
        command = ["eval-judge", str(pairs), "--endpoint", at, "--model", "judge"]
        assert main([*command, "--out", str(tmp_path / "out")]) == 0
    assert len(seen.requests) == 2 * len(PAIRS)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["pairs"], summary["judged"], summary["failures"]) == (6, 5, {"unparsable": 2})
    assert summary["agreement"] == 3 / 5 and summary["preference"] == 2 / 4
    assert (summary["tie_recall"], summary["tie_precision"]) == (1.0, 1 / 2)
    assert (summary["position_bias"], summary["favours_candidate"]) == (1 / 5, 1.0)
    assert summary["missing"] == pytest.approx(1 / 6)
    rows = [json.loads(x) for x in (tmp_path / "out" / "rulings.jsonl").read_text().splitlines()]
    assert [(row["first"], row["swapped"]) for row in rows] == [
        *((1, -1), (-1, 1), (0, 0), (-1, 1), (1, 1), (None, None))
    ]
    assert rows[5]["endings"] == ["Who knows?"] * 2 and rows[5]["row"].endswith("line 6")
    output = capsys.readouterr().out
    assert "6 pairs, 2 of them ties; 5 judged in both orders" in output
    assert "questions without a verdict: unparsable 2" in output and "line 6, ended: 'Who" in output


def test_the_first_so_many_and_a_judge_that_is_not_there(pairs, capsys):
    command = ["eval-judge", str(pairs), "--model", "judge", "--most", "1", "--timeout-s", "1"]
    assert main([*command, "--endpoint", "http://127.0.0.1:9/v1"]) == 0
    output = capsys.readouterr().out
    assert "1 pairs, 0 of them ties; 0 judged" in output
    assert "unreachable 2" in output or "late 2" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--endpoint", "nowhere"], "rewards.judge.endpoint = 'nowhere': must be an address"),
        (["--endpoint", "http://127.0.0.1:9/v1", "--requests", "0"], "rewards.judge.requests = 0"),
        (["--endpoint", "http://127.0.0.1:9/v1", "--out", "."], "--out . is there already"),
    ],
)
def test_what_cannot_be_is_one_line(pairs, words, message, capsys):
    assert main(["eval-judge", str(pairs), "--model", "judge", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys):
    command = ["eval-judge", "no.jsonl", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m"]
    assert main(command) == 2 and "no.jsonl" in capsys.readouterr().err
