"""Verifier verdicts on the answers of rows, from the same worker processes that training
runs use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compass_jax.config import DataConfig, RewardConfig
from compass_jax.config.prepare import PrepareConfig
from compass_jax.curate.kept import Row
from compass_jax.curate.resume import resumed_lines
from compass_jax.records import Prompt, Score
from compass_jax.rewards.score import Scorer
from compass_jax.tasks.rows import encode_row
from compass_jax.verifiers.base import kinds


class Verdict(NamedTuple):
    """A verifier's verdict: unknown, correct, or the reason why the answer is wrong."""

    known: bool
    wrong: str = ""


class Judge:
    """A context manager that owns a verifier's workers.

    Verdicts are stored in the file `path`, so that a command that was killed judges no row twice.
    Raises ConfigError and VerifierError like `Scorer`.
    """

    def __init__(self, config: PrepareConfig, path: Path):
        self._name = config.reward
        kind = kinds().get(config.reward)
        self._compares = kind is not None and kind.answer
        self._rewards = RewardConfig(
            workers=config.workers, timeout_s=config.timeout_s, answer_tag=config.answer_tag
        )
        verdicts = (value for _, _, value in resumed_lines(path))
        self._verdicts = {key: Verdict(True, wrong) for key, wrong in verdicts}
        self._file = path.open("a")
        self._scorer = Scorer(self._rewards, DataConfig(sources=(config.source,)))

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._scorer.close()
        self._file.close()

    def __call__(self, rows: Sequence[Row]) -> list[Verdict]:
        """Returns the verdict on each row's answer.

        The verdict is unknown if the verifier needs a reference and the row lacks it, or if the
        check fails.
        """
        keys = [hashlib.blake2b(row.line, digest_size=16).hexdigest() for row in rows]
        verdicts = [self._verdicts.get(key, Verdict(False)) for key in keys]
        for i, row in enumerate(rows):
            if verdicts[i].known or (row.reference is None and self._compares):
                continue
            reference = {} if row.reference is None else {"answer": row.reference}
            no_tokens = np.zeros(1, np.int32)
            encoded = encode_row({**row.columns, **reference})
            prompt = Prompt(0, 0, "", row.sample.asked, no_tokens, "", encoded)
            self._scorer.submit(i, prompt, row.sample.answer)
        while done := self._scorer.collect(block=True):
            for i, score in done:
                verdicts[i] = self._verdict(score, rows[i].reference)
                if verdicts[i].known:
                    self._file.write(json.dumps([keys[i], verdicts[i].wrong]) + "\n")
        self._file.flush()
        return verdicts

    def _verdict(self, score: Score, reference: Any) -> Verdict:
        if not score.known:
            return Verdict(False)
        if score.reward >= self._rewards.right_at:
            return Verdict(True)
        compared = "" if reference is None else f"; the reference is {reference!r:.80}"
        return Verdict(True, f"{self._name} gives {score.reward:g}{compared}")
