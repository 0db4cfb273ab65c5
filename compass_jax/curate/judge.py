"""The verdict of a verifier on the answers of rows, in the workers that judge a run's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from compass_jax.config import DataConfig, RewardConfig
from compass_jax.config.prepare import PrepareConfig
from compass_jax.curate.sample import Sample
from compass_jax.records import Prompt, Score
from compass_jax.rewards.score import Scorer
from compass_jax.tasks.rows import encode_row
from compass_jax.verifiers.find import kinds


class Verdict(NamedTuple):
    """What the verifier says: nothing (not known), right, or why the answer is wrong."""

    known: bool
    wrong: str = ""


class Judge:
    """A verifier's workers, as a context manager. Raises ConfigError and VerifierError like
    `Scorer`.
    """

    def __init__(self, config: PrepareConfig):
        self._name = config.reward
        known = kinds().get(config.reward)
        self._compares = known is not None and known.answer
        self._rewards = RewardConfig(
            workers=config.workers, timeout_s=config.timeout_s, answer_tag=config.answer_tag
        )
        self._scorer = Scorer(self._rewards, DataConfig(sources=(config.source,)))

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._scorer.close()

    def __call__(self, cases: Sequence[tuple[Sample, Any, Mapping[str, Any]]]) -> list[Verdict]:
        """The verdict on the answer of each (sample, reference, row); none where the verifier
        compares and the row has no reference, or the check fails.
        """
        found = [Verdict(False)] * len(cases)
        for i, (sample, reference, row) in enumerate(cases):
            if reference is None and self._compares:
                continue
            columns = dict(row) if reference is None else {**row, "answer": reference}
            no_tokens = np.zeros(1, np.int32)
            prompt = Prompt(0, 0, "", sample.asked, no_tokens, "", encode_row(columns))
            self._scorer.submit(i, prompt, sample.answer)
        while done := self._scorer.collect(block=True):
            for i, score in done:
                found[i] = self._verdict(score, cases[i][1])
        return found

    def _verdict(self, score: Score, reference: Any) -> Verdict:
        if not score.known:
            return Verdict(False)
        if score.reward >= self._rewards.right_at:
            return Verdict(True)
        said = "" if reference is None else f"; the reference is {reference!r:.80}"
        return Verdict(True, f"{self._name} gives {score.reward:g}{said}")
