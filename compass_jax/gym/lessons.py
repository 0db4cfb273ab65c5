"""Rows for the stages of a small pipeline (configs/compass_max_tiny_cpu.py): single steps of
arithmetic, chains of thought over several steps, and the shop questions of gym/prices.py.

Each function yields rows, which the seed determines.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

from compass_jax.aliases import JsonMapping, JsonObject
from compass_jax.gym import prices
from compass_jax.tasks.task import Task

SUM = "Sum: {} ="
DIGITS = range(6)
TERMS = (3, 4)  # numbers of terms in a chain
DUPLICATES, BROKEN = 0.03, 0.03  # shares of rows that a cleaning stage should remove


def _row(question: str, response: str, answer: str) -> JsonObject:
    talk = (("user", question), ("assistant", response))
    return {
        "messages": [{"role": role, "content": text} for role, text in talk],
        "answer": answer,
    }


def facts(seed: int = 0, reads: int = 400) -> Iterator[JsonObject]:
    """Yields the single steps that chains consist of: sums, differences and products, each with its
    solution, and `reads` questions about the numbers in orders.
    """
    sums = [(f"{a} + {b}", a + b) for a in range(-15, 26) for b in DIGITS]
    differences = [(f"{a} - {b}", a - b) for a in range(-15, 26) for b in DIGITS]
    products = [(f"{a} * {b}", a * b) for a in range(2, 6) for b in range(2, 6)] * 4
    for text, value in sums + differences + products:
        response = f"{text} = {value}\n<answer>{value}</answer>"
        yield _row(SUM.format(text), response, str(value))
    counts = [row for row in prices.rows(seed, 2 * reads) if row["domain"] == "count"]
    for row in random.Random(f"{seed} reads").sample(counts, reads):
        yield _row(row["prompt"], prices.response(row), row["answer"])


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
    seed: int = 0,
    each: int = 1200,
    terms: Sequence[int] = TERMS,
    worked: float = 0.5,
    hasty: bool = False,
) -> Iterator[JsonObject]:
    """Yields chains of sums, `each` rows for each number of terms.

    A share `worked` of the answers shows its steps. The others give only the answer, and with
    `hasty` they omit the last term. Some rows are duplicated, and some are truncated or have a
    wrong answer.
    """
    random_ = random.Random(f"{seed} chains")
    for count in terms:
        for _ in range(each):
            question, steps, total = _chain(random_, count)
            answer, shown_steps = total, steps
            if random_.random() >= worked:
                shown_steps, answer = [], int(steps[-1].split()[0]) if hasty else total
            row = _row(
                question, "\n".join([*shown_steps, f"<answer>{answer}</answer>"]), str(total)
            )
            yield row
            if random_.random() < DUPLICATES:
                yield row
            if random_.random() < BROKEN:
                ends = [f"<answer>{total + 1}</answer>", "<answer>" + str(total)]
                broken = "\n".join([*steps, random_.choice(ends)])
                yield _row(question, broken, str(total))


def orders(seed: int = 0, each: int = 400, careful: float = 0.5) -> Iterator[JsonObject]:
    """Yields the shop questions; a share `careful` of them has a correct answer with its steps."""
    random_ = random.Random(f"{seed} orders")
    for row in prices.rows(seed, each):
        response = prices.response(row, careless=random_.random() >= careful)
        yield _row(row["prompt"], response, row["answer"])


def asked_chains(
    seed: int = 1000, each: int = 120, terms: Sequence[int] = TERMS
) -> Iterator[JsonObject]:
    """Yields distinct evaluation questions with their answers."""
    random_, questions = random.Random(f"{seed} asked"), set[str]()
    for count in terms:
        while len(questions) < each * (terms.index(count) + 1):
            question, _, total = _chain(random_, count)
            if question not in questions:
                questions.add(question)
                yield {"prompt": question, "answer": str(total), "difficulty": count}


def sums(seed: int) -> Iterator[JsonObject]:
    """Yields the prompts of the task: chains of sums, for each number of terms."""
    yield from asked_chains(seed, 600)


task = Task(sums, "exact")


def asked_prices(seed: int = 1000, each: int = 27) -> Iterator[JsonObject]:
    """Yields the shop's evaluation questions with their answers."""
    for row in prices.rows(seed, each):
        yield {key: row[key] for key in ("prompt", "answer", "domain", "language")}


ANSWER = re.compile(r"<answer>(-?\d+)</answer>")


def _candidate(random_: random.Random, row: JsonMapping) -> str:
    """Returns an answer to a row of gym/prices.py as a policy in training gives it: careful,
    careless, without its steps, with a stray number, or broken off.
    """
    text = prices.response(row, careless=random_.random() < 0.4)
    kind = random_.random()
    if kind < 0.25:
        return ANSWER.sub(f"<answer>{random_.randint(1, 30)}</answer>", text)
    if kind < 0.35:
        return text.splitlines()[-1]
    if kind < 0.45:
        start = random_.randrange(len(text))
        return text[:start] + text[start + random_.randint(1, 6) :]
    return text


def pairs(seed: int = 2, each: int = 400, copies: int = 4) -> Iterator[JsonObject]:
    """Yields preferences for a judge (docs/howto/judge.md): `copies` answers to each of the shop's
    questions against the right number. An answer with this number is a Tie, any other is Worse; the
    reasoning reads both numbers.
    """
    random_ = random.Random(f"{seed} pairs")
    for row in prices.rows(seed, each):
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
