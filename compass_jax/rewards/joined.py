"""Scores that are put together of several verdicts on the same response: the workers', the judge's,
and the gold label of a source that has `gold`.

The gold label becomes the component "gold" of the score. Where it cannot be had the score is the
same without it: a label measures and must not decide who is trained on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

from compass_jax.config import DataConfig
from compass_jax.config.verifiers import JUDGE
from compass_jax.records import GOLD, Prompt, Score
from compass_jax.rewards.asking import Asker, Pooled
from compass_jax.rewards.checks import DECIMALS, gold_places, judged_sources
from compass_jax.rewards.judging import Judge
from compass_jax.rewards.scalar import ScalarJudge
from compass_jax.rewards.score import Scorer
from compass_jax.tasks.rows import decode_row, encode_row

AnyJudge = Judge | ScalarJudge
WORKERS = "workers"
TURN_S = 0.05  # workers and judge are waited for in turns


@dataclasses.dataclass
class _Held:
    """What is known of a sample: its parts by name, None while they are not known."""

    source: int
    parts: dict[str, Score | None]


class JoinedScorer:
    """A `Scorer` whose scores have all their parts. A sample is collected when its last part is
    known.
    """

    def __init__(self, scorer: Scorer, data: DataConfig, judge: AnyJudge | None = None):
        self._scorer, self._judge = scorer, judge
        self._judged = judged_sources(data) if judge is not None else {}
        self._gold = gold_places(data)
        self._held: dict[Hashable, _Held] = {}

    def submit(self, key: Hashable, prompt: Prompt, response: str | Callable[[], str]) -> None:
        """Queues a response as `Scorer.submit` does."""
        if key in self._held:
            raise ValueError(f"{key!r} was submitted twice: a sample is scored once")
        text = response if isinstance(response, str) else functools.cache(response)
        source, parts = prompt.source, dict[str, Score | None]()
        judged = self._judged.get(source)
        if judged is not None and self._judge is not None:
            self._judge.submit((key, JUDGE), prompt, text)
            parts[JUDGE] = None
        if judged is None or not judged.alone:
            self._scorer.submit((key, WORKERS), prompt, text)
            parts[WORKERS] = None
        if source in self._gold:
            place, row = self._gold[source], _gold_row(prompt.row)
            asked = dataclasses.replace(prompt, source=place, row=row)
            self._scorer.submit((key, GOLD), asked, text)
            parts[GOLD] = None
        self._held[key] = _Held(source, parts)

    @property
    def judge(self) -> AnyJudge | None:
        """The judge, if there is one."""
        return self._judge

    @property
    def asker(self) -> Asker | None:
        """Who brings questions to a judge that is asked; None: there is no such judge."""
        return self._judge.asker if isinstance(self._judge, Judge) else None

    @property
    def slow(self) -> bool:
        """Whether a verdict may take minutes, so that a stop must not wait for it."""
        return isinstance(self.asker, Pooled)

    @property
    def workers(self) -> Scorer:
        """The scorer of the workers' verdicts."""
        return self._scorer.workers

    @property
    def outstanding(self) -> int:
        """Samples submitted and not yet collected."""
        return len(self._held)

    def collect(self, block: bool) -> list[tuple[Any, Score]]:
        """What has all its parts since the last call; `block` and errors as in `Scorer.collect`,
        and those of `Judge.collect`.
        """
        found = []
        while True:
            for (key, part), score in self._said(block):
                held = self._held[key]
                held.parts[part] = score
                if all(x is not None for x in held.parts.values()):
                    del self._held[key]
                    found.append((key, self._joined(held)))
            if found or not block or not self._held:
                return found

    def _said(self, block: bool) -> list[tuple[Any, Score]]:
        """Parts that are known by now, after waiting for one of those that are outstanding."""
        if self._judge is None or not self._judge.outstanding:
            return self._scorer.collect(block)
        found = self._scorer.collect(False)
        both = bool(found) or self._scorer.outstanding > 0
        return found + self._judge.collect((TURN_S if both else None) if block else 0)

    def _joined(self, held: _Held) -> Score:
        parts = {name: x for name, x in held.parts.items() if x is not None}
        score, said, gold = (parts.get(name) for name in (WORKERS, JUDGE, GOLD))
        if said is not None:
            score = _summed(score, said, self._judged[held.source].weight)
        assert score is not None
        if gold is not None:
            label = {GOLD: gold.reward} if gold.known else {}
            others = {name: x for name, x in score.components.items() if name != GOLD}
            score = dataclasses.replace(score, components={**others, **label})
        return score

    def wait_ready(self) -> None:
        """Until the workers have finished their imports."""
        self._scorer.wait_ready()

    def close(self) -> None:
        """Ends the workers and what asks the judge; what was not collected is dropped."""
        self._scorer.close()
        if self._judge is not None:
            self._judge.close()

    def __enter__(self) -> JoinedScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _summed(workers: Score | None, judge: Score, weight: float) -> Score:
    """The judge's score times its weight, plus what the workers gave; unknown where one is."""
    components = {**(workers.components if workers else {}), **judge.components}
    if judge.known and (workers is not None or weight != 1):
        components[JUDGE] = judge.reward
    unknown = next((x for x in (workers, judge) if x is not None and not x.known), None)
    if unknown is not None:
        return dataclasses.replace(unknown, components=components)
    total = weight * judge.reward + (workers.reward if workers else 0.0)
    extracted = workers is None or workers.extracted
    return Score(round(total, DECIMALS), True, components=components, extracted=extracted)


def _gold_row(row: str) -> str:
    """A prompt's row as the gold verifier reads it: its column "gold", where there is one, is the
    reference.
    """
    if f'"{GOLD}"' not in row:
        return row
    columns = decode_row(row)
    return encode_row({**columns, "answer": columns[GOLD]}) if GOLD in columns else row
