"""Detection of evaluation questions in training rows (decontamination)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from compass_jax.apps.curate.sample import Sample
from compass_jax.apps.curate.words import Numbers, hashed, runs, words
from compass_jax.config import DataConfig, FileSource
from compass_jax.data.questions import evaluation_questions

# a run of words that this many questions share, or half of fewer ones, comes from their template
OF_TEMPLATE = 10


class Hit(NamedTuple):
    """An evaluation question that a training row contains."""

    question: int  # index into Contamination.questions
    why: str


class Contamination:
    """An index of the questions of evaluation files, which finds training rows that contain one.

    A row contains a question if the two share a run of `length` words. A user message that equals a
    whole question also matches, which covers questions of fewer words. Runs of words shared by at
    least OF_TEMPLATE questions, or by more than half of them, are instructions of a template and
    are ignored.

    Raises DataError for a file that cannot be read.
    """

    def __init__(self, files: Sequence[str], length: int, tell: Callable[[str], None]):
        self.length = length
        self.files = list(files)
        self.questions: list[str] = []
        self.of_file: list[int] = []  # for each question, the index of its file in `files`
        by_hash: dict[int, int] = {}
        question_runs: list[Numbers] = []
        for file_index, file in enumerate(files):
            sources = (FileSource(file, verifier="exact"),)
            for question in evaluation_questions(DataConfig(eval_sources=sources), 0, tell):
                hashes = hashed(words(question.text))
                if not len(hashes):
                    continue
                by_hash.setdefault(_hash_all(hashes), len(self.questions))
                question_runs.append(
                    np.unique(runs(hashes, length)) if len(hashes) >= length else hashes[:0]
                )
                self.questions.append(question.text)
                self.of_file.append(file_index)
        content = json.dumps([self.files, self.questions, self.of_file])
        self.digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        self._by_hash = by_hash
        self._runs, self._owner = _rare(question_runs, list(by_hash.values()))

    def hit(self, sample: Sample) -> Hit | None:
        """Returns the first evaluation question that the row contains, or None."""
        for text in sample.of("user"):
            hashes = hashed(words(text))
            if len(hashes) and (question := self._by_hash.get(_hash_all(hashes))) is not None:
                return Hit(question, "it asks an evaluation question")
        if len(sample.words) < self.length or not len(self._runs):
            return None
        row_runs = runs(sample.words, self.length)
        positions = np.minimum(np.searchsorted(self._runs, row_runs), len(self._runs) - 1)
        equal = np.flatnonzero(self._runs[positions] == row_runs)
        if not len(equal):
            return None
        owner = int(self._owner[positions[equal[0]]])
        return Hit(owner, f"it shares {self.length} words in a row with an evaluation question")


def _hash_all(hashes: Numbers) -> int:
    return int(runs(hashes, len(hashes))[0])


def _rare(question_runs: Sequence[Numbers], distinct: Sequence[int]) -> tuple[Numbers, np.ndarray]:
    """Returns the runs of words that are not a template's, sorted, and the first question with
    each.

    Args:
        question_runs: the distinct runs of each question.
        distinct: indices of the distinct questions.
    """
    flat = np.concatenate([np.zeros(0, np.uint64), *(question_runs[i] for i in distinct)])
    owner = np.repeat(np.array(distinct, np.int64), [len(question_runs[i]) for i in distinct])
    distinct_runs, first_index, counts = np.unique(flat, return_index=True, return_counts=True)
    is_rare = counts < min(OF_TEMPLATE, max(2, len(distinct) // 2 + 1))
    return distinct_runs[is_rare], owner[first_index[is_rare]]
