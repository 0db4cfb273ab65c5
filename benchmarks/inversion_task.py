"""A task whose gold labels are known, for benchmarks/inversion.py: which of three digits is the
largest? The largest is worth 1, the middle one 0.5, any other text 0.

Preferences on its answers say Better, Tie or Worse of a candidate against an anchor, as the gold
labels do; a share of them is noise: the verdict is one of the two others. Each has a reason, from
the worths that the answers are taken to have; a noisy row's reason is wrong too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

from compass_jax.rewards.verifiers import judge

VERDICTS = ("Worse", "Tie", "Better")
WORTH = {"neither": 0.0, "middle": 0.5, "largest": 1.0}
NAMES = {worth: name for name, worth in WORTH.items()}
# verdict -> possible worths of the candidate and the anchor that lead to it
TAKEN_FOR = {
    verdict: [(a, b) for a in NAMES for b in NAMES if (a > b) - (a < b) == sign]
    for verdict, sign in zip(VERDICTS, (-1, 0, 1), strict=True)
}
MIXTURE = (0.4, 0.3, 0.3)  # answers: the largest, the middle one, any of the ten digits


def questions(draw: random.Random) -> list[str]:
    """Returns all 720 questions, such as "3 8 5", shuffled."""
    triples = [" ".join(three) for three in itertools.permutations("0123456789", 3)]
    draw.shuffle(triples)
    return triples


def texts() -> list[str]:
    """Returns texts that policy and judge read and write, to train a tokenizer."""
    dialogues = (judge.messages(one, "3", "4") for one in questions(random.Random(0))[:50])
    contents = [message["content"] for talk in dialogues for message in talk]
    why = f"candidate 3 {' '.join(WORTH)}, anchor 4"
    return [*contents, *VERDICTS, why, "system\nuser\nassistant\n"]


def gold(prompt: str, response: str) -> float:
    """Returns the worth of an answer, as a verifier: the prompt's last line is the question."""
    *_, middle, largest = sorted(prompt.split("\n")[-1].split())
    return {largest: 1.0, middle: 0.5}.get(response.strip(), 0.0)


def an_answer(question: str, draw: random.Random) -> str:
    """Returns an answer drawn from MIXTURE."""
    *_, middle, largest = sorted(question.split())
    (kind,) = draw.choices((largest, middle, ""), MIXTURE)
    return kind or draw.choice("0123456789")


def pairs(
    prompts: Sequence[str], count: int, noise: float, draw: random.Random
) -> Iterator[dict[str, str]]:
    """Yields rows of preferences, `count` in all, over the questions in turn."""
    for question in itertools.islice(itertools.cycle(prompts), count):
        candidate, anchor = an_answer(question, draw), an_answer(question, draw)
        one, two = gold(question, candidate), gold(question, anchor)
        verdict = VERDICTS[1 + (one > two) - (one < two)]
        if draw.random() < noise:
            verdict = draw.choice([other for other in VERDICTS if other != verdict])
            one, two = draw.choice(TAKEN_FOR[verdict])
        row = {"prompt": question, "candidate": candidate, "anchor": anchor, "verdict": verdict}
        yield row | {"reasoning": reason(row, one, two)}


def reason(row: Mapping[str, str], candidate: float, anchor: float) -> str:
    """Returns the reason for the verdict on a row, from the worths that its answers are taken to
    have.
    """
    one, two = (f"{row[x]} {NAMES[y]}" for x, y in (("candidate", candidate), ("anchor", anchor)))
    return f"{row['prompt']}: candidate {one}, anchor {two}"


def conversations(
    prompts: Sequence[str], count: int, draw: random.Random
) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yields the policy's first conversations: `count` answers of MIXTURE, over the questions in
    turn.
    """
    for question in itertools.islice(itertools.cycle(prompts), count):
        messages = (("user", question), ("assistant", an_answer(question, draw)))
        yield {"messages": [{"role": role, "content": text} for role, text in messages]}
