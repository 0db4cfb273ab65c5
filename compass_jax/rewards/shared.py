"""Scores over several processes: each checks its share of the samples in its own workers, and all
learn all scores.

Every process submits every sample, in the same order; number n is checked by process n mod
processes. What a check said is exchanged where the caller waits, so that all go on with the same
scores, outcomes of hangs and crashes included.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable
from typing import Any

from compass_jax.records import Prompt, Score
from compass_jax.rewards.faults import VerifierError
from compass_jax.rewards.joined import JoinedScorer
from compass_jax.rewards.score import Scorer


class SharedScorer:
    """A `Scorer` among those of other processes. `exchange` gives every process's bytes, in their
    order, and is called by all at the same places.
    """

    slow = False  # nobody may leave alone

    def __init__(
        self,
        scorer: Scorer | JoinedScorer,
        process: int,
        processes: int,
        exchange: Callable[[bytes], list[bytes]],
    ):
        self._scorer, self._process, self._processes, self._exchange = (
            scorer,
            process,
            processes,
            exchange,
        )
        self._count = 0
        # key -> number, of everything submitted and not collected
        self._keys: dict[Hashable, int] = {}

    def submit(self, key: Hashable, prompt: Prompt, response: str | Callable[[], str]) -> None:
        """Queues a response where it belongs; ValueError for a key that is still outstanding."""
        if key in self._keys:
            raise ValueError(f"{key!r} was submitted twice: a sample is scored once")
        self._keys[key] = self._count
        if self._count % self._processes == self._process:
            self._scorer.submit(self._count, prompt, response)
        self._count += 1

    @property
    def workers(self) -> Scorer:
        """The scorer of the workers' verdicts."""
        return self._scorer.workers

    @property
    def outstanding(self) -> int:
        """Samples submitted and not yet collected."""
        return len(self._keys)

    def collect(self, block: bool) -> list[tuple[Any, Score]]:
        """All that was submitted, in that order, when every process has checked its share. Without
        `block` nothing: clocks differ. Raises the VerifierError of any process in all of them.
        """
        if not block or not self._keys:
            return []
        mine: list[tuple[Any, Score]] = []
        failure = ""
        try:
            while self._scorer.outstanding:
                mine += self._scorer.collect(block=True)
        except VerifierError as error:  # the others have to end, too
            failure = str(error)
        scores = [[number, *dataclasses.astuple(score)] for number, score in mine]
        payload = json.dumps([failure, scores])
        parts = [json.loads(part) for part in self._exchange(payload.encode())]
        for failure, _ in parts:
            if failure:
                raise VerifierError(failure)
        found = {number: Score(*rest) for _, part in parts for number, *rest in part}
        results = [(key, found[number]) for key, number in self._keys.items()]
        self._keys.clear()
        return results

    def wait_ready(self) -> None:
        """Until this process's workers have finished their imports."""
        self._scorer.wait_ready()

    def close(self) -> None:
        """Ends this process's workers."""
        self._scorer.close()

    def __enter__(self) -> SharedScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


AnyScorer = Scorer | JoinedScorer | SharedScorer
