"""The shop's questions of one turn: answers are recomputed from the questions' texts, in every
language.
"""

import re
from math import prod

from compass_jax.config import DataConfig, TaskSource
from compass_jax.gym import prices
from compass_jax.gym.shop import ITEMS
from compass_jax.rewards.checks import Graded, build, checks_of

ROWS = list(prices.rows(0, 40))
SOURCE = TaskSource("compass_jax.gym.prices:task")
JUDGE = build(checks_of(DataConfig(sources=(SOURCE,)))[0], "answer")
RIGHT, WRONG = Graded(1.0, {}), Graded(0.0, {})
PATTERNS = {
    ("price", "en"): r"A (\w+) costs (\d+)\. How much are (\d+)\?",
    ("price", "id"): r"Satu (\w+) harganya (\d+)\. Berapa harga (\d+)\?",
    ("price", "pt"): r"Um (\w+) custa (\d+)\. Quanto custam (\d+)\?",
    ("delivery", "en"): r"A (\w+) costs (\d+), delivery (\d+)\. How much are (\d+)\?",
    ("delivery", "id"): r"Satu (\w+) harganya (\d+), ongkir (\d+)\. Berapa harga (\d+)\?",
    ("delivery", "pt"): r"Um (\w+) custa (\d+), o envio (\d+)\. Quanto custam (\d+)\?",
    ("count", "en"): r"Order: (\d+) (\w+), (\d+) (\w+)\. How many (\w+)\?",
    ("count", "id"): r"Pesanan: (\d+) (\w+), (\d+) (\w+)\. Berapa (\w+)\?",
    ("count", "pt"): r"Pedido: (\d+) (\w+), (\d+) (\w+)\. Quantos (\w+)\?",
}


def solved(row):
    """Returns (answer, items) of a question, computed from its text alone."""
    kind = row["domain"]
    fields = re.fullmatch(PATTERNS[kind, row["language"]], row["prompt"]).groups()
    if kind == "count":
        first, one, second, other, target = fields
        return int({one: first, other: second}[target]), {one, other}
    item, price, *fee, n = fields
    return sum(int(price) for _ in range(int(n))) + sum(map(int, fee)), {item}


def test_answers_are_those_of_the_questions_in_every_kind_and_language():
    assert {(r["domain"], r["language"]) for r in ROWS} == PATTERNS.keys()
    for row in ROWS:
        answer, items = solved(row)
        assert row["answer"] == str(answer) and items <= {*ITEMS[row["language"]]}


def test_a_right_answer_scores_1_and_its_steps_are_true():
    for row in ROWS:
        text = prices.response(row)
        assert JUDGE(row, text, row["prompt"]) == RIGHT
        for a, sign, b, c in re.findall(r"(\d+) ([+*]) (\d+) = (\d+)", text):
            assert int(c) == (int(a) + int(b) if sign == "+" else prod((int(a), int(b))))
        steps = text.count("\n")
        assert steps == {"count": 1, "price": 1, "delivery": 2}[row["domain"]]


def test_a_careless_answer_scores_0_but_where_two_and_two_is_twice_two():
    for row in ROWS:
        two = row["domain"] == "price" and row["numbers"]["price"] == row["numbers"]["n"] == 2
        text = prices.response(row, careless=True)
        assert JUDGE(row, text, row["prompt"]) == (RIGHT if two else WRONG)


def test_rows_follow_from_the_seed_and_are_distinct():
    repeat, other = (list(prices.rows(seed, 40)) for seed in (0, 1))
    assert repeat == ROWS and other != ROWS
    for rows in (ROWS, other):
        assert len({row["prompt"] for row in rows}) == len(rows) == 40 * len(PATTERNS)


def test_the_task_asks_the_rows_of_its_seed_without_what_answers_are_made_of():
    (first, *remaining), (row, *_) = prices.task.prompts(3), prices.rows(3, 300)
    assert first == {key: row[key] for key in ("prompt", "answer", "domain", "language")}
    assert len({one["prompt"] for one in remaining}) == len(remaining)
    assert prices.task.verify == "exact"
