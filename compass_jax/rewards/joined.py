"""Scores that are put together of several verdicts on the same response: the reward, and the gold
label of a source that has `gold`.

The gold label becomes the component "gold" of the score. Where it cannot be had the score is the
same without it: a label measures and must not decide who is trained on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

from compass_jax.config import DataConfig
from compass_jax.records import GOLD, Prompt, Score
from compass_jax.rewards.checks import gold_places
from compass_jax.rewards.score import Scorer
from compass_jax.tasks.rows import decode_row, encode_row

REWARD = "reward"


class JoinedScorer:
    """A `Scorer` whose scores have all their parts. A sample is collected when its last part is
    known.
    """

    def __init__(self, scorer: Scorer, data: DataConfig):
        self._scorer = scorer
        self._gold = gold_places(data)
        # key -> its parts by name, None while they are not known
        self._held: dict[Hashable, dict[str, Score | None]] = {}

    def submit(self, key: Hashable, prompt: Prompt, response: str | Callable[[], str]) -> None:
        """Queues a response as `Scorer.submit` does."""
        text = response if isinstance(response, str) else functools.cache(response)
        self._scorer.submit((key, REWARD), prompt, text)
        self._held[key] = {REWARD: None}
        if prompt.source in self._gold:
            asked = dataclasses.replace(
                prompt, source=self._gold[prompt.source], row=_gold_row(prompt.row)
            )
            self._scorer.submit((key, GOLD), asked, text)
            self._held[key][GOLD] = None

    @property
    def outstanding(self) -> int:
        """Samples submitted and not yet collected."""
        return len(self._held)

    def collect(self, block: bool) -> list[tuple[Any, Score]]:
        """What has all its parts since the last call; `block` and errors as in `Scorer.collect`."""
        found = []
        while True:
            for (key, part), score in self._scorer.collect(block):
                self._held[key][part] = score
                parts = {name: x for name, x in self._held[key].items() if x is not None}
                if len(parts) == len(self._held[key]):
                    del self._held[key]
                    found.append((key, _joined(parts)))
            if found or not block or not self._held:
                return found

    def wait_ready(self) -> None:
        """Until the workers have finished their imports."""
        self._scorer.wait_ready()

    def close(self) -> None:
        """Ends the workers; what was not collected is dropped."""
        self._scorer.close()

    def __enter__(self) -> JoinedScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _joined(parts: dict[str, Score]) -> Score:
    score = parts[REWARD]
    others = {name: x for name, x in score.components.items() if name != GOLD or GOLD not in parts}
    gold = parts.get(GOLD)
    label = {GOLD: gold.reward} if gold is not None and gold.known else {}
    return dataclasses.replace(score, components={**others, **label})


def _gold_row(row: str) -> str:
    """A prompt's row as the gold verifier reads it: its column "gold", where there is one, is the
    reference.
    """
    if f'"{GOLD}"' not in row:
        return row
    columns = decode_row(row)
    return encode_row({**columns, "answer": columns[GOLD]}) if GOLD in columns else row
