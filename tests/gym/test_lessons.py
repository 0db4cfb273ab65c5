"""The rows of a small pipeline's stages: every answer and every step is recomputed from the
question's text.
"""

import json
import re
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest

from compass_jax.config import DataConfig, EvalSet, FileSource, TaskSource
from compass_jax.curate.contamination import Contamination
from compass_jax.curate.sample import Sample
from compass_jax.data.questions import OVERLAP, questions
from compass_jax.gym import lessons, prices
from compass_jax.rewards.checks import build, checks_of

SUMS = TaskSource("compass_jax.gym.lessons:task", label="sums")
JUDGE = build(checks_of(DataConfig(sources=(SUMS,)))[0], "answer")
CHAINS = list(lessons.chains(each=300))
FACTS = list(lessons.facts(reads=60))
ORDERS = list(lessons.orders(each=30))


def question_text(row):
    return row["messages"][0]["content"]


def answer_text(row):
    assert [turn["role"] for turn in row["messages"]] == ["user", "assistant"]
    return row["messages"][1]["content"]


def value(text):
    """Returns the value of a text like "3 + 4 - 1", from left to right, or of one product."""
    first, *terms = re.findall(r"(?:^|[+*-] )-?\d+", text)
    total = int(first)
    for sign, number in (other.split() for other in terms):
        total = {"+": total + int(number), "-": total - int(number), "*": total * int(number)}[sign]
    return total


def asks_sum(row):
    return question_text(row).startswith("Sum: ")


def reward(row):
    return JUDGE(row, answer_text(row), question_text(row)).reward


def answer_of(question):
    return value(re.fullmatch(r"Sum: (.+) =", question)[1])


def test_answers_are_those_of_the_questions():
    sums = [row for row in (*CHAINS, *FACTS) if asks_sum(row)]
    assert len(sums) == len(CHAINS) + 41 * 6 * 2 + 16 * 4
    for row in sums:
        assert row["answer"] == str(answer_of(question_text(row)))
    for row in [*lessons.asked_chains(), *lessons.sums(0)]:
        assert row["answer"] == str(answer_of(row["prompt"]))
        assert row["difficulty"] == len(re.findall(r"\d", row["prompt"]))
    shop = {row["prompt"]: row["answer"] for row in prices.rows(0, 120)}
    reads = [row for row in FACTS if not asks_sum(row)]
    assert len(reads) == 60
    for row in (*reads, *ORDERS):
        assert row["answer"] == shop[question_text(row)]


def test_every_step_that_is_shown_is_true_and_follows_from_the_one_before():
    for row in (*CHAINS, *FACTS):
        steps = [step.split(" = ") for step in answer_text(row).split("\n") if " = " in step]
        assert all(value(step) == int(result) for step, result in steps)
        for (_, result), (step, _) in pairwise(steps):
            assert re.match(r"-?\d+", step)[0] == result


def test_few_chains_break_off_or_end_wrong_and_a_share_is_worked():
    wrong = [row for row in CHAINS if reward(row) == 0]
    assert 0.5 < len(wrong) / (600 * lessons.BROKEN) < 2
    unclosed = [row for row in wrong if not answer_text(row).endswith("</answer>")]
    assert 0 < len(unclosed) < len(wrong)
    first = {question_text(row): row for row in reversed(CHAINS)}  # the first of its question
    worked = np.mean([" = " in answer_text(row) for row in first.values()])
    assert worked == pytest.approx(0.5, abs=0.08)
    assert not any(
        " = " in answer_text(row) for row in lessons.chains(each=50, worked=0) if reward(row)
    )
    twice = Counter(json.dumps(row) for row in CHAINS)
    assert sum(n - 1 for n in twice.values()) >= 0.5 * 600 * lessons.DUPLICATES


def test_a_share_of_the_orders_is_answered_with_care():
    languages = Counter(row["language"] for row in prices.rows(0, 30))
    assert len(ORDERS) == 30 * 9 and set(languages.values()) == {90}
    assert np.mean([reward(row) for row in ORDERS]) == pytest.approx(0.5, abs=0.1)
    assert {reward(row) for row in lessons.orders(each=9, careful=1)} == {1.0}
    assert np.mean([reward(row) for row in lessons.orders(each=30, careful=0)]) < 0.05


GENERATORS = (
    lessons.facts,
    lessons.chains,
    lessons.orders,
    lessons.asked_chains,
    lessons.asked_prices,
)


@pytest.mark.parametrize("function", GENERATORS, ids=lambda one: one.__name__)
def test_rows_follow_from_the_seed(function):
    first, repeat, other = (list(islice(function(seed), 900)) for seed in (7, 7, 8))
    assert first == repeat and first != other


@pytest.fixture
def files(tmp_path):
    """Returns the files on which the pipeline evaluates."""
    evaluation_sets = {"chains": lessons.asked_chains(), "prices": lessons.asked_prices()}
    for name, rows in evaluation_sets.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(tmp_path / f"{name}.jsonl") for name in evaluation_sets]


def test_no_lesson_that_cleaning_leaves_asks_an_evaluation_question(files):
    """Before the cleaning some lessons ask one: both draw from the same few thousand questions."""
    evaluated = {row["prompt"] for row in (*lessons.asked_chains(), *lessons.asked_prices())}
    contamination = Contamination(files, 13, lambda line: None)
    for rows in (CHAINS, ORDERS):
        left = [
            row for row in rows if contamination.hit(Sample("", row["messages"], (), 3)) is None
        ]
        assert evaluated & {question_text(row) for row in rows}
        assert left and not evaluated & {question_text(row) for row in left}


@pytest.mark.parametrize("task", ["lessons", "prices"])
def test_no_prompt_of_rl_is_an_evaluation_question(files, task):
    sets = tuple(
        EvalSet(name, (FileSource(file, label=name, verifier="exact"),))
        for name, file in zip(("chains", "prices"), files, strict=True)
    )
    source = TaskSource(f"compass_jax.gym.{task}:task", label="rl")
    notices = []
    pool = questions(DataConfig((source,), heldout_frac=0.0, eval_sets=sets), 0, notices.append)
    evaluated = {one.text for one in pool if one.heldout}
    assert len(evaluated) == 483
    assert not evaluated & {one.text for one in pool if not one.heldout}
    known = sum(OVERLAP in one.labels for one in pool)
    assert known and any(f"{known} of its" in line and "may know them" in line for line in notices)


def test_hasty_answers_leave_the_last_term_out_and_show_no_steps():
    rows = [
        row
        for row in lessons.chains(each=200, worked=0.25, hasty=True)
        if "=" not in answer_text(row)
    ]
    bare = [row for row in rows if answer_text(row).endswith("</answer>")]
    assert len(bare) > 250
    for row in bare:
        question = re.fullmatch(r"Sum: (.+) [+-] \d =", question_text(row))[1]
        assert answer_text(row) == f"<answer>{value(question)}</answer>"
        assert row["answer"] == str(answer_of(question_text(row)))


def test_a_pair_is_a_tie_where_the_verifier_finds_the_answer_right():
    """Any other pair is Worse; the reasoning has the number that the verifier compared."""
    rows = list(lessons.pairs(each=40, copies=3))
    assert rows == list(lessons.pairs(each=40, copies=3)) != list(lessons.pairs(3, 40, 3))
    for row in rows:
        graded = JUDGE({"answer": row["anchor"]}, row["candidate"], row["prompt"])
        assert row["verdict"] == ("Tie" if graded.reward == 1 else "Worse")
        number, anchor = re.fullmatch(r"candidate (\S+), anchor (\d+)", row["reasoning"]).groups()
        assert (number == anchor) == (row["verdict"] == "Tie") and anchor == row["anchor"]
    verdicts = Counter(row["verdict"] for row in rows)
    assert 0.35 < verdicts["Tie"] / len(rows) < 0.55
    assert any("none" in row["reasoning"] for row in rows)
    assert any("\n" not in row["candidate"] for row in rows)  # without its steps
