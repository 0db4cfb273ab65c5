"""The preferences of the experiment with SmolLM2 as a judge: verdicts, ties, reasons."""

import json
import random
from collections import Counter

import pytest

from benchmarks.smollm2_judge import KINDS, UNSURE, by_fact, known, pairs, questions, table
from compass_jax.data.preferences import asked_in_both_orders
from compass_jax.rewards.judges.agreement import agreement

FACTS = [(kind, thing) for kind in KINDS for thing in kind.facts]
ASKED = questions(FACTS)


def worth(question, text):
    """Returns the value of an answer, judged by its text alone."""
    if text in UNSURE:
        return 0.5
    last = text.removesuffix(".").removeprefix("I think it is ")
    frame = question.kind.sentence.format(question.thing, "|").split("|")[0]
    return float(last.removeprefix(frame).lower() == question.right.lower())


def test_the_verdict_compares_what_the_texts_are_worth():
    shuffled = random.Random(0).sample(ASKED, len(ASKED))
    rows = list(pairs(shuffled, 900, random.Random(1)))
    by_question = {x.kind.question.format(x.thing): x for x in ASKED}
    for row in rows:
        question = by_question[row["prompt"]]
        first, second = (worth(question, row[name]) for name in ("candidate", "anchor"))
        verdict = ("Worse", "Tie", "Better")[1 + (first > second) - (first < second)]
        assert row["verdict"] == verdict, row
        assert row["candidate"] != row["anchor"]
    counts = Counter(row["verdict"] for row in rows)
    assert all(0.28 < counts[verdict] / 900 < 0.39 for verdict in ("Worse", "Tie", "Better")), (
        counts
    )


def test_the_reason_names_the_right_answer_and_follows_the_order(tmp_path):
    rows = list(pairs(ASKED, 12, random.Random(2)))
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = list(asked_in_both_orders(str(file)))
    for row, first, swapped in zip(rows, examples[::2], examples[1::2], strict=True):
        right = KINDS[0].facts  # the first twelve questions have the first kind
        assert right[row["prompt"].split()[-1].rstrip("?")] in first.taught
        assert first.taught.splitlines()[-1] == row["verdict"]
        renamed = first.taught.replace("candidate", "x").replace("anchor", "candidate")
        assert swapped.taught.splitlines()[0] == renamed.replace("x", "anchor").splitlines()[0]


def test_the_answers_to_held_out_facts_are_in_no_training_pair():
    facts = random.Random(3).sample(FACTS, len(FACTS))
    heldout, training = questions(facts[:40]), questions(facts[40:])
    for question in training:
        heldout_answers = {x.right for x in heldout if x.kind is question.kind}
        assert not heldout_answers & {question.right, *question.others}
        assert question.right not in question.others and len(question.others) > 5
    rows = list(pairs(heldout, 100, random.Random(4)))
    assert {row["prompt"] for row in rows} == {x.kind.question.format(x.thing) for x in heldout}


def test_no_answer_serves_two_facts():
    for kind in KINDS:
        answers = Counter(kind.facts.values())
        assert max(answers.values()) == 1, answers.most_common(2)
        assert all(thing and answer for thing, answer in kind.facts.items())


def test_a_share_of_nothing_is_no_number_and_the_table_says_so():
    shares = agreement([1, -1], [None, None], [None, None])
    assert known(shares, "agreement") is None and known(shares, "missing") == 1.0
    row = {"variant": "untrained", "seed": 0, "training_minutes": 0.0, "missing": 1.0}
    row |= dict.fromkeys(
        ("agreement", "preference", "tie_recall", "tie_precision", "position_bias")
    )
    assert "| untrained | 1 | - | - | - | - | - | 1.000 | 0.000 |" in table([row])
    assert known(agreement([0, 1], [0, 1], [0, -1]), "agreement") == pytest.approx(1.0)


def test_intervals_are_over_facts_not_over_pairs():
    """There are two facts of 50 pairs each, and one is always right: the agreement is 0.5, and its
    interval is 0 to 1.
    """
    rulings = [{"gold": 0, "first": 0, "swapped": 0}] * 50
    rulings += [{"gold": 1, "first": -1, "swapped": 1}] * 50
    summary = by_fact(rulings, ["a"] * 50 + ["b"] * 50)
    assert summary["agreement_interval"] == [0.0, 1.0] and summary["tie_recall_interval"] == [
        1.0,
        1.0,
    ]
    assert (summary["facts"], summary["majority"]) == (2, 0.5)
    missing = by_fact([{"gold": 1, "first": None, "swapped": 1}], ["a"])
    assert missing["agreement_interval"] is None
