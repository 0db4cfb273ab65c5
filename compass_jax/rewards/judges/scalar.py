"""Rewards of a scalar reward model, computed in one batch when the caller waits for them.

    reward = sigmoid(r(answer) - r(anchor))        [ours: probability that the answer is better]

All samples of a prompt have the same anchor, so the reward is monotonic in r(answer). It is in
[0, 1], like all rewards. An empty answer has reward 0 where the anchor has text.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from compass_jax.base.chat.base import AUTO
from compass_jax.base.records import Prompt, Score
from compass_jax.config import ConfigError
from compass_jax.rewards.faults import NEVER, VerifierError
from compass_jax.rewards.judges.judging import NO_ANCHOR, compared, is_blank

logger = logging.getLogger(__name__)

# maps (question, answer) pairs to scores r; None for a pair that is too long
Rate = Callable[[Sequence[tuple[str, str]]], Sequence[float | None]]
TOO_LONG = "question and answer exceed the last of rewards.judge.buckets"


class ScalarJudge:
    """A scalar reward model as a judge. The owner of the model sets `rate`."""

    def __init__(self, anchor_field: str, chat_format: str = AUTO):
        self.rate: Rate | None = None
        self._anchor_field = anchor_field
        self._chat_format = chat_format
        self._held: list[tuple[Hashable, Prompt, str | Callable[[], str]]] = []
        self._anchors: dict[tuple[str, str], float | None] = {}
        self._refused = 0  # number of samples refused before the first reward; -1 after it

    @property
    def outstanding(self) -> int:
        """Number of samples submitted and not yet collected."""
        return len(self._held)

    def submit(self, key: Hashable, prompt: Prompt, response: str | Callable[[], str]) -> None:
        """Stores a response until `collect` waits."""
        self._held.append((key, prompt, response))

    def collect(self, wait_s: float | None) -> list[tuple[Any, Score]]:
        """Returns the scores of all submitted samples; an empty list with `wait_s` = 0.

        Raises ConfigError if no model is set, VerifierError if the first samples have no reward,
        and the error of a `response` function.
        """
        if wait_s == 0 or not self._held:
            return []
        if self.rate is None:
            raise ConfigError(
                "rewards.judge: a scalar reward model rates in `compass train` alone; leave"
                " ScalarJudgeConfig out, or judge by another verifier"
            )
        samples, self._held = self._held, []
        questions, anchors = [], list[tuple[str, str] | None]()
        for _, prompt, response in samples:
            text, anchor = compared(prompt, response, self._anchor_field, self._chat_format)
            questions.append((prompt.question, text))
            anchors.append(None if anchor is None else (prompt.question, anchor))
        new = list(dict.fromkeys(x for x in anchors if x is not None and x not in self._anchors))
        rates = self.rate([*questions, *new])
        self._anchors.update(zip(new, rates[len(questions) :], strict=True))
        # `rates` is longer than the samples: the new anchors are at its end.
        scores = [
            Score(0.0, True, components={"judge_refused": 0.0})
            if is_blank(question[1], anchor and anchor[1])
            else self._score(rate, anchor)
            for question, rate, anchor in zip(questions, rates, anchors, strict=False)
        ]
        return [(key, score) for (key, _, _), score in zip(samples, scores, strict=True)]

    def _score(self, rate: float | None, anchor: tuple[str, str] | None) -> Score:
        other = None if anchor is None else self._anchors[anchor]
        if rate is not None and other is not None and math.isfinite(rate - other):
            self._refused = -1
            # The sigmoid; math.exp would overflow for a large difference.
            reward = 0.5 * (1 + math.tanh((rate - other) / 2))
            return Score(reward, True, components={"judge_refused": 0.0, "scalar": rate})
        why = NO_ANCHOR.format(self._anchor_field) if anchor is None else TOO_LONG
        if rate is not None and other is not None:
            why = f"the reward model's numbers, {rate} and {other}, are not finite"
        if self._refused == 0:
            logger.warning(
                f"the reward model gave no reward ({why}); such samples are left out, and counted"
                " in reward/judge_refused/mean"
            )
        if self._refused >= 0:
            self._refused += 1
        if self._refused >= NEVER:
            raise VerifierError(
                f"rewards.judge: {NEVER} samples were refused and none was rated: {why}"
            )
        return Score(0.0, False, "error", why, {"judge_refused": 1.0})

    def close(self) -> None:
        """Drops the uncollected samples."""
        self._held = []


def tie_margin(margins: np.ndarray, gold: np.ndarray) -> float:
    """Returns the tie threshold of reward differences: the smallest margin with the best agreement
    with `gold` (1, 0, -1) on the same pairs.

    A scalar model has no ties, so this gives it the best threshold in hindsight.
    """
    if not len(margins):
        return 0.0
    sizes = np.abs(margins)
    tried = np.concatenate([[0.0], np.sort(sizes)])
    right = [np.mean(verdicts(margins, limit) == gold) for limit in tried]
    return float(tried[int(np.argmax(right))])


def verdicts(margins: np.ndarray, limit: float) -> np.ndarray:
    """Returns 1 if the candidate's reward exceeds the anchor's by more than `limit`, -1 if it is
    lower by more than `limit`, else 0.
    """
    return np.where(np.abs(margins) <= limit, 0, np.sign(margins)).astype(int)
