"""Short single-turn questions about a shop in three languages: the price of several items, with or
without delivery, and the count of an item in an order.

A careful answer shows its steps ("3 * 4 = 12") before its `<answer>`. A careless answer omits the
delivery, adds instead of multiplying, or reads the wrong number. RL must learn to prefer careful
answers (configs/compass_max_tiny_cpu.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial

from compass_jax.aliases import JsonMapping, JsonObject
from compass_jax.gym.shop import ITEMS, distinct
from compass_jax.tasks.task import Task

QUESTIONS = {
    "en": {
        "price": "A {item} costs {price}. How much are {n}?",
        "delivery": "A {item} costs {price}, delivery {fee}. How much are {n}?",
        "count": "Order: {order}. How many {item}?",
    },
    "id": {
        "price": "Satu {item} harganya {price}. Berapa harga {n}?",
        "delivery": "Satu {item} harganya {price}, ongkir {fee}. Berapa harga {n}?",
        "count": "Pesanan: {order}. Berapa {item}?",
    },
    "pt": {
        "price": "Um {item} custa {price}. Quanto custam {n}?",
        "delivery": "Um {item} custa {price}, o envio {fee}. Quanto custam {n}?",
        "count": "Pedido: {order}. Quantos {item}?",
    },
}
KINDS = tuple(QUESTIONS["en"])


def rows(seed: int, each: int, languages: Sequence[str] = tuple(ITEMS)) -> Iterator[JsonObject]:
    """Yields up to `each` distinct questions of each kind and language, with their answers."""
    for kind in KINDS:
        for language in languages:
            random_ = random.Random(f"{seed} {kind} {language}")
            yield from distinct(partial(_row, random_, kind, language), each)


def _row(random_: random.Random, kind: str, language: str) -> JsonObject:
    items = random_.sample(ITEMS[language], 2)
    counts = random_.sample(range(1, 10), 2)
    chosen = random_.randrange(2)
    numbers = {
        "price": random_.randint(2, 5),
        "fee": random_.randint(1, 5),
        "n": random_.randint(2, 5),
    }
    order = ", ".join(f"{n} {item}" for n, item in zip(counts, items, strict=True))
    text = QUESTIONS[language][kind].format(item=items[chosen], order=order, **numbers)
    total = numbers["price"] * numbers["n"] + numbers["fee"] * (kind == "delivery")
    return {
        "prompt": text,
        "answer": str(counts[chosen] if kind == "count" else total),
        "domain": kind,
        "language": language,
        "numbers": numbers,
        "read": [f"{counts[chosen]} {items[chosen]}", str(counts[1 - chosen])],
    }


def response(row: JsonMapping, careless: bool = False) -> str:
    """Returns a correct answer to a row with its steps, or a careless, mostly wrong one."""
    numbers = row["numbers"]
    price, n, fee = numbers["price"], numbers["n"], numbers["fee"]
    if row["domain"] == "count":
        steps, answer = ([], row["read"][1]) if careless else ([row["read"][0]], row["answer"])
    elif row["domain"] == "price":
        answer = str(price + n) if careless else row["answer"]
        steps = [f"{n} {'+' if careless else '*'} {price} = {answer}"]
    else:
        steps = [f"{n} * {price} = {n * price}"]
        steps += [] if careless else [f"{n * price} + {fee} = {row['answer']}"]
        answer = str(n * price) if careless else row["answer"]
    return "\n".join([*steps, f"<answer>{answer}</answer>"])


def prompts(seed: int) -> Iterator[JsonObject]:
    """Yields the prompts of the task."""
    for row in rows(seed, 300):
        yield {key: row[key] for key in ("prompt", "answer", "domain", "language")}


task = Task(prompts, "exact")
judged = Task(prompts, "judge")  # the same questions, for a judge (rewards.judge)
