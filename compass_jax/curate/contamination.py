"""Evaluation questions that stand in training rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from compass_jax.config import DataConfig, FileSource
from compass_jax.curate.sample import Sample
from compass_jax.curate.words import Numbers, hashed, runs, words
from compass_jax.data.questions import evaluation_questions

# so many questions, or half of fewer ones, do not share a run of words by chance: it is their
# template's
OF_TEMPLATE = 10


class Hit(NamedTuple):
    """An evaluation question that a row holds."""

    question: int  # of Contamination.questions
    why: str


class Contamination:
    """The questions of evaluation files, as training rows are looked through for them.

    A row holds a question where they share a run of `length` words; or where a message of the user
    is the question as a whole, which is how questions of fewer words are found. A run of words that
    OF_TEMPLATE of the questions have, or more than half of them, is an instruction that they share,
    and tells nothing.

    Raises DataError for a file that cannot be read.
    """

    def __init__(self, files: Sequence[str], length: int, tell: Callable[[str], None]):
        self.length = length
        self.files = list(files)
        self.questions: list[str] = []
        self.of_file: list[int] = []  # of each question: its file's place in `files`
        whole: dict[int, int] = {}
        found: list[Numbers] = []
        for place, file in enumerate(files):
            sources = (FileSource(file, verifier="exact"),)
            for question in evaluation_questions(DataConfig(eval_sources=sources), 0, tell):
                said = hashed(words(question.text))
                if not len(said):
                    continue
                whole.setdefault(_whole(said), len(self.questions))
                found.append(np.unique(runs(said, length)) if len(said) >= length else said[:0])
                self.questions.append(question.text)
                self.of_file.append(place)
        told = json.dumps([self.files, self.questions, self.of_file])
        self.digest = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
        self._whole = whole
        self._runs, self._owner = _rare(found, list(whole.values()))

    def hit(self, sample: Sample) -> Hit | None:
        """The first evaluation question that a row holds; None where it holds none."""
        for text in sample.of("user"):
            said = hashed(words(text))
            if len(said) and (found := self._whole.get(_whole(said))) is not None:
                return Hit(found, "it asks an evaluation question")
        if len(sample.words) < self.length or not len(self._runs):
            return None
        mine = runs(sample.words, self.length)
        at = np.minimum(np.searchsorted(self._runs, mine), len(self._runs) - 1)
        equal = np.flatnonzero(self._runs[at] == mine)
        if not len(equal):
            return None
        owner = int(self._owner[at[equal[0]]])
        return Hit(owner, f"it shares {self.length} words in a row with an evaluation question")


def _whole(said: Numbers) -> int:
    return int(runs(said, len(said))[0])


def _rare(found: Sequence[Numbers], distinct: Sequence[int]) -> tuple[Numbers, np.ndarray]:
    """(the runs of words that few of the distinct questions have, sorted; the first question that
    has each).
    """
    flat = np.concatenate([np.zeros(0, np.uint64), *(found[i] for i in distinct)])
    owner = np.repeat(np.array(distinct, np.int64), [len(found[i]) for i in distinct])
    kinds, first, counts = np.unique(flat, return_index=True, return_counts=True)
    few = counts < min(OF_TEMPLATE, max(2, len(distinct) // 2 + 1))
    return kinds[few], owner[first[few]]
