"""Pairs of answers in the forms that people write, and rows that are not pairs."""

import json

import pytest

from compass_jax.config import ConfigError, DataConfig, FileSource
from compass_jax.data.files import DataError
from compass_jax.data.preferences import asked_in_both_orders, read_preferences
from compass_jax.data.questions import questions
from compass_jax.rewards.verifiers.judge import messages


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "q", "candidate": "a", "anchor": "b", "verdict": "Worse"}, ("q", "a", "b", -1)),
        ({"question": "q", "candidate": "a", "anchor": "b", "verdict": " tie"}, ("q", "a", "b", 0)),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, ("q", "a", "b", 1)),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "tie": True}, ("q", "a", "b", 0)),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "verdict": "tie"}, ("q", "a", "b", 0)),
        ({"prompt": chat("q"), "chosen": chat("a"), "rejected": chat("b")}, ("q", "a", "b", 1)),
        ({"chosen": chat("q", "a"), "rejected": chat("q", "b")}, ("q", "a", "b", 1)),
        (
            {"chosen": chat("q", "x", "r", "a"), "rejected": chat("q", "x", "r", "b")},
            ("user: q\nassistant: x\nuser: r", "a", "b", 1),
        ),
    ],
)
def test_the_forms_of_a_pair(tmp_path, row, expected):
    (pair,) = read_preferences(write(tmp_path / "pairs.jsonl", row))
    assert pair[:4] == expected and pair.where.endswith("pairs.jsonl, line 1")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q"}, "line 2: a preference has candidate, anchor and verdict, or chosen and"),
        ({"prompt": "q", "candidate": "a", "anchor": "b"}, "verdict is None; write Better, Tie"),
        (
            {"prompt": "q", "candidate": "a", "anchor": "b", "verdict": "good"},
            "verdict is 'good'; write Better, Tie or Worse",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "tie": 1}, "tie is 1; write true"),
        ({"chosen": "a", "rejected": "b"}, "no prompt: write one"),
        ({"chosen": chat("q", "a"), "rejected": chat("p", "b")}, "begin with other messages"),
        (
            {"prompt": "q", "chosen": 7, "rejected": "b"},
            "chosen: messages must be a non-empty list",
        ),
        ({"prompt": " ", "chosen": "a", "rejected": "b"}, "prompt is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "reasoning": 1}, "reasoning is 1; write"),
        (
            {"prompt": [{"role": "user"}], "chosen": "a", "rejected": "b"},
            r"prompt: messages\[0\] must be an object",
        ),
    ],
)
def test_what_is_no_pair_is_named_with_its_line(tmp_path, row, message):
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    with pytest.raises(DataError, match=message):
        list(read_preferences(write(tmp_path / "pairs.jsonl", good, row)))


def test_a_pair_is_asked_in_both_orders_with_its_verdict_turned_round(tmp_path):
    row = {"prompt": "q", "candidate": "a", "anchor": "b", "verdict": "Worse"}
    why = "The candidate errs; the Anchor does not.\n**Worse**"
    one, two = asked_in_both_orders(write(tmp_path / "p.jsonl", {**row, "reasoning": why}))
    assert (one.messages, two.messages) == (messages("q", "a", "b"), messages("q", "b", "a"))
    assert one.taught == "The candidate errs; the Anchor does not.\nWorse"
    assert two.taught == "The anchor errs; the Candidate does not.\nBetter"
    one, two = asked_in_both_orders(write(tmp_path / "p.jsonl", row))
    assert (one.taught, two.taught) == ("Worse", "Better")


def pairs(count, first=0):
    """Returns two pairs for each question; every third pair is a tie."""
    return [
        {"prompt": f"question {n // 2}", "chosen": f"a {n}", "rejected": "b", "tie": n % 3 == 0}
        for n in range(first, first + count)
    ]


def test_the_orders_of_a_pair_and_all_pairs_of_a_question_are_on_one_side_of_the_split(tmp_path):
    path = write(tmp_path / "p.jsonl", *pairs(80))
    pool = questions(DataConfig(sources=(FileSource(path, verifier="verdict"),)), 0)
    assert len(pool) == 160 and len({one.id for one in pool}) == 160
    sides = {}
    for one in pool:
        sides.setdefault(one.asks, []).append(one.heldout)
    assert len(sides) == 40 and {len(side) for side in sides.values()} == {4}
    assert all(len(set(side)) == 1 for side in sides.values())
    assert {side[0] for side in sides.values()} == {True, False}
    for one, two in zip(pool[::2], pool[1::2], strict=True):
        assert {one.answer, two.answer} in ({"Better", "Worse"}, {"Tie"})
        assert json.loads(one.row) == {"answer": one.answer}
        assert one.labels == (f"verdict/{one.answer}", "order/first")
        assert two.labels == (f"verdict/{two.answer}", "order/swapped")


def test_a_question_of_the_evaluation_is_not_trained_on_with_other_answers(tmp_path):
    train = FileSource(write(tmp_path / "p.jsonl", *pairs(20)), verifier="verdict")
    evaluation_rows = [{**row, "chosen": "other"} for row in pairs(1)]
    evaluation = FileSource(write(tmp_path / "e.jsonl", *evaluation_rows), verifier="verdict")
    notices = []
    pool = questions(DataConfig((train,), (evaluation,)), 0, notices.append)
    assert [one.asks for one in pool if one.heldout] == ["question 0"] * 2
    assert "question 0" not in {one.asks for one in pool if not one.heldout}
    assert notices[-1].startswith("4 of 40 training questions are in data.eval_sources too")


def test_columns_of_preferences_have_fixed_names():
    with pytest.raises(ConfigError, match="the rows are preferences, whose columns have fixed"):
        FileSource("p.jsonl", "q", verifier="verdict").validate("data.sources[0]")
