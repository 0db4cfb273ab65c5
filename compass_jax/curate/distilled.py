"""The answers of a teacher that `compass distil` has drawn and judged, and those that are kept."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from compass_jax.config.distil import DistilConfig
from compass_jax.data.files import DataError
from compass_jax.untrusted import parse_json, read_lines

Key = tuple[int, int]  # Question.id, number of the sample


class Answer(NamedTuple):
    """A line of answers.jsonl."""

    id: int
    sample: int
    text: str
    thought: str
    tokens: int
    whole: bool
    reward: float
    known: bool
    outcome: str

    def right(self, right_at: float) -> bool:
        """Whether it is learnt from: one that was cut has no end to learn."""
        return self.known and self.whole and self.reward >= right_at

    @property
    def content(self) -> str:
        """What is learnt: the chain of thought, where it came apart, and the answer."""
        return f"<think>\n{self.thought}\n</think>\n\n{self.text}" if self.thought else self.text


class Answers:
    """answers.jsonl, and where each answer stands in it. A half last line, which a kill leaves, is
    cut off.
    """

    def __init__(self, path: Path):
        self.path = path
        self.offsets: dict[Key, int] = {}
        self._size = 0
        for where, line in read_lines(path, error=DataError) if path.exists() else ():
            if not line.endswith(b"\n"):
                os.truncate(path, self._size)
                break
            self._note(_read(line, where), len(line))

    def add(self, answers: Sequence[Answer]) -> None:
        """Appends lines."""
        with self.path.open("ab") as file:
            for answer in answers:
                line = json.dumps(answer._asdict(), ensure_ascii=False).encode() + b"\n"
                file.write(line)
                self._note(answer, len(line))

    def of(self, question: int, samples: int) -> list[Answer]:
        """The first `samples` answers to a question, as many as there are."""
        found = []
        with self.path.open("rb") as file:
            for sample in range(samples):
                if (offset := self.offsets.get((question, sample))) is not None:
                    file.seek(offset)
                    found.append(_read(file.readline(), f"{self.path}, byte {offset}"))
        return found

    def _note(self, answer: Answer, size: int) -> None:
        self.offsets.setdefault((answer.id, answer.sample), self._size)
        self._size += size


def _read(line: bytes, where: str) -> Answer:
    value = parse_json(line, where, error=DataError)
    if not isinstance(value, dict) or set(value) != set(Answer._fields):
        raise DataError(
            f"{where}: not a line of compass distil; correct it, or delete the line, and its answer"
            " is drawn again"
        )
    return Answer(**value)


def chosen(answers: Sequence[Answer], config: DistilConfig) -> list[Answer]:
    """The right answers to one question that are kept, at most `config.keep` and no text twice."""
    right_at = config.rewards.right_at
    right = {a.content: a for a in reversed(answers) if a.right(right_at)}
    distinct = sorted(right.values(), key=lambda a: a.sample)
    if config.choose == "random":
        number = distinct[0].id if distinct else 0
        drawn = random.Random(f"{config.seed}:{number}")
        return drawn.sample(distinct, min(config.keep, len(distinct)))
    return sorted(distinct, key=lambda a: (a.tokens, len(a.content), a.sample))[: config.keep]
