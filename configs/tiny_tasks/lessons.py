"""Rows for the stages of compass_max_tiny_cpu.py: single steps of arithmetic, chains of sums, and
questions about the orders of a shop in three languages.

A careful answer shows its steps ("3 * 4 = 12") before its `<answer>`. A careless answer to a
question of the shop omits the delivery, adds instead of multiplying, or reads the wrong number. RL
must learn to prefer careful answers. Each function yields rows, which the seed determines.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from compass_jax.rewards.tasks import Task

Row = dict[str, Any]

SUM = "Sum: {} ="
DIGITS = range(6)
TERMS = (3, 4)  # numbers of terms in a chain
DUPLICATES, BROKEN = 0.03, 0.03  # shares of rows that a cleaning stage should remove
TRIES = 50  # repeated draws after which no new question is expected
ANSWER = re.compile(r"<answer>(-?\d+)</answer>")
ITEMS = {
    "en": ("pen", "cup", "bag", "hat", "lamp", "book", "soap", "ring", "mat", "fan"),
    "id": ("pena", "gelas", "tas", "topi", "lampu", "buku", "sabun", "cincin", "tikar", "kipas"),
    "pt": ("caneta", "copo", "bolsa", "boina", "foco", "livro", "giz", "anel", "tapete", "leque"),
}
QUESTIONS = {
    "price": {
        "en": "A {item} costs {price}. How much are {n}?",
        "id": "Satu {item} harganya {price}. Berapa harga {n}?",
        "pt": "Um {item} custa {price}. Quanto custam {n}?",
    },
    "delivery": {
        "en": "A {item} costs {price}, delivery {fee}. How much are {n}?",
        "id": "Satu {item} harganya {price}, ongkir {fee}. Berapa harga {n}?",
        "pt": "Um {item} custa {price}, o envio {fee}. Quanto custam {n}?",
    },
    "count": {
        "en": "Order: {order}. How many {item}?",
        "id": "Pesanan: {order}. Berapa {item}?",
        "pt": "Pedido: {order}. Quantos {item}?",
    },
}


def _row(question: str, response: str, answer: int | str) -> Row:
    talk = (("user", question), ("assistant", response))
    messages = [{"role": role, "content": text} for role, text in talk]
    return {"messages": messages, "answer": str(answer)}


def _response(steps: Sequence[str], answer: int) -> str:
    return "\n".join([*steps, f"<answer>{answer}</answer>"])


def _distinct(draw: Callable[[], Row], each: int) -> Iterator[Row]:
    """Yields rows with distinct prompts, at most `each`; fewer after TRIES repeated ones."""
    prompts: set[str] = set()
    repeated = 0
    while len(prompts) < each and repeated < TRIES:
        row = draw()
        repeated = repeated + 1 if row["prompt"] in prompts else 0
        if not repeated:
            prompts.add(row["prompt"])
            yield row


# ---- sums ----------------------------------------------------------------------------------------


def facts(seed: int = 0, reads: int = 400) -> Iterator[Row]:
    """Yields the single steps that chains consist of: sums, differences and products, each with its
    solution, and `reads` questions about the numbers in orders.
    """
    sums = [(f"{a} + {b}", a + b) for a in range(-15, 26) for b in DIGITS]
    differences = [(f"{a} - {b}", a - b) for a in range(-15, 26) for b in DIGITS]
    products = [(f"{a} * {b}", a * b) for a in range(2, 6) for b in range(2, 6)] * 4
    for text, value in sums + differences + products:
        yield _row(SUM.format(text), _response([f"{text} = {value}"], value), value)
    counts = list(questions(seed, 2 * reads, ["count"]))
    for row in random.Random(f"{seed} reads").sample(counts, reads):
        yield _row(row["prompt"], row["careful"], row["answer"])


def _chain(random_: random.Random, terms: int) -> tuple[str, list[str], int]:
    """Returns (question, steps, answer) of a sum of `terms` digits."""
    total = random_.choice(DIGITS)
    text, steps = str(total), []
    for _ in range(terms - 1):
        sign, digit = random_.choice("+-"), random_.choice(DIGITS)
        after = total + digit if sign == "+" else total - digit
        text += f" {sign} {digit}"
        steps.append(f"{total} {sign} {digit} = {after}")
        total = after
    return SUM.format(text), steps, total


def chains(
    seed: int = 0, each: int = 1200, worked: float = 0.5, hasty: bool = False
) -> Iterator[Row]:
    """Yields chains of sums, `each` rows for each number of terms.

    A share `worked` of the answers shows its steps. The others give only the answer, and with
    `hasty` they omit the last term. Some rows are duplicated, and some are truncated or have a
    wrong answer.
    """
    random_ = random.Random(f"{seed} chains")
    for terms in (terms for terms in TERMS for _ in range(each)):
        question, steps, total = _chain(random_, terms)
        shown_steps, answer = steps, total
        if random_.random() >= worked:
            shown_steps, answer = [], int(steps[-1].split()[0]) if hasty else total
        row = _row(question, _response(shown_steps, answer), total)
        yield row
        if random_.random() < DUPLICATES:
            yield row
        if random_.random() < BROKEN:
            ends = [f"<answer>{total + 1}</answer>", f"<answer>{total}"]
            yield _row(question, "\n".join([*steps, random_.choice(ends)]), total)


def _asked_chain(random_: random.Random, terms: int) -> Row:
    question, _, total = _chain(random_, terms)
    return {"prompt": question, "answer": str(total), "difficulty": terms}


def asked_chains(seed: int = 1000, each: int = 120) -> Iterator[Row]:
    """Yields up to `each` distinct chains of each number of terms, with their answers."""
    random_ = random.Random(f"{seed} asked")
    for terms in TERMS:
        yield from _distinct(partial(_asked_chain, random_, terms), each)


sums = Task(partial(asked_chains, each=600), "exact")


# ---- the shop's questions ------------------------------------------------------------------------


def questions(seed: int, each: int, kinds: Sequence[str] = tuple(QUESTIONS)) -> Iterator[Row]:
    """Yields up to `each` distinct questions of each kind and language, with the right answer and
    the responses `careful` and `careless`.
    """
    for kind in kinds:
        for language in ITEMS:
            random_ = random.Random(f"{seed} {kind} {language}")
            yield from _distinct(partial(_question, random_, kind, language), each)


def _question(random_: random.Random, kind: str, language: str) -> Row:
    items = random_.sample(ITEMS[language], 2)
    counts = random_.sample(range(1, 10), 2)
    chosen = random_.randrange(2)
    price, fee, n = random_.randint(2, 5), random_.randint(1, 5), random_.randint(2, 5)
    order = ", ".join(f"{count} {item}" for count, item in zip(counts, items, strict=True))
    numbers = {"item": items[chosen], "order": order, "price": price, "fee": fee, "n": n}
    steps, careless_steps = [f"{n} * {price} = {n * price}"], []
    if kind == "price":
        answer, wrong = n * price, n + price
        careless_steps = [f"{n} + {price} = {wrong}"]
    elif kind == "delivery":
        answer, wrong = n * price + fee, n * price
        careless_steps = steps
        steps = [*steps, f"{wrong} + {fee} = {answer}"]
    else:
        answer, wrong = counts[chosen], counts[1 - chosen]
        steps = [f"{answer} {items[chosen]}"]
    return {
        "prompt": QUESTIONS[kind][language].format(**numbers),
        "answer": str(answer),
        "domain": kind,
        "language": language,
        "careful": _response(steps, answer),
        "careless": _response(careless_steps, wrong),
    }


def orders(seed: int = 0, each: int = 400, careful: float = 0.5) -> Iterator[Row]:
    """Yields the shop's questions; a share `careful` of them has the careful answer."""
    random_ = random.Random(f"{seed} orders")
    for row in questions(seed, each):
        response = row["careless" if random_.random() >= careful else "careful"]
        yield _row(row["prompt"], response, row["answer"])


def asked_prices(seed: int = 1000, each: int = 27) -> Iterator[Row]:
    """Yields the shop's questions with their right answers."""
    for row in questions(seed, each):
        yield {key: row[key] for key in ("prompt", "answer", "domain", "language")}


prices = Task(partial(asked_prices, each=300), "judge")  # for a judge (rewards.judge)


def _candidate(random_: random.Random, row: Row) -> str:
    """Returns an answer to a question as a policy in training gives it: careful, careless, without
    its steps, with a stray number, or broken off.
    """
    text = row["careless" if random_.random() < 0.4 else "careful"]
    kind = random_.random()
    if kind < 0.25:
        return ANSWER.sub(f"<answer>{random_.randint(1, 30)}</answer>", text)
    if kind < 0.35:
        return text.splitlines()[-1]
    if kind < 0.45:
        start = random_.randrange(len(text))
        return text[:start] + text[start + random_.randint(1, 6) :]
    return text


def pairs(seed: int = 2, each: int = 400, copies: int = 4) -> Iterator[Row]:
    """Yields preferences for a judge (docs/howto/judge.md): `copies` answers to each of the shop's
    questions against the right number. An answer with this number is a Tie, any other is Worse; the
    reasoning reads both numbers.
    """
    random_ = random.Random(f"{seed} pairs")
    for row in questions(seed, each):
        for _ in range(copies):
            candidate = _candidate(random_, row)
            numbers = ANSWER.findall(candidate) or ["none"]
            yield {
                "prompt": row["prompt"],
                "candidate": candidate,
                "anchor": row["answer"],
                "verdict": "Tie" if numbers[-1] == row["answer"] else "Worse",
                "reasoning": f"candidate {numbers[-1]}, anchor {row['answer']}",
            }
