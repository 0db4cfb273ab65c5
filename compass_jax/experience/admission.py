"""Further samples of a group in the rollout of its first ones.

Growth and screening decide on a group by the verdicts on its samples. In rounds, the samples that
they ask for start when the last sample of the whole rollout has ended, and the slots of the others
are empty until then. Here they start in the same rollout, as soon as their own group is decided.
They are the same samples: a key determines its sample, and the policy sees the same scores.

A verdict is used rl.verdict_ticks decode calls after the one in which its sample ended, or at once
where nothing else runs; it is waited for. So no decision depends on a clock, and all processes
admit the same samples at the same tick.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from compass_jax.base.records import Rollout, SampleKey, Score
from compass_jax.experience.buffer import ExperienceBuffer
from compass_jax.experience.collect import Collector
from compass_jax.experience.step_policies.ask import PolicyCalls
from compass_jax.experience.turns import Turns
from compass_jax.rewards.joined import AnyScorer


class OpenCollector(Collector):
    """A Collector that admits further samples while others decode. Rounds remain where
    rl.verdict_ticks is None, and where a judge gives verdicts, which takes minutes or the engine.
    """

    def _sample(
        self,
        buffer: ExperienceBuffer,
        calls: PolicyCalls,
        missing: Sequence[SampleKey],
        *settings: Any,
    ) -> None:
        ticks = self.sampling.verdict_ticks
        if ticks is None or not self.scorer.workers_only:
            return super()._sample(buffer, calls, missing, *settings)
        batcher = self.batcher
        admission = Admission(buffer, calls, self.scorer, self.turns, missing, ticks)
        self.batcher = partial(batcher, admit=admission)
        try:
            super()._sample(buffer, calls, missing, *settings)
        finally:
            self.batcher = batcher
            admission.close()


class Admission:
    """The samples that a running collection starts after each tick.

    Args:
        samples: those with which the collection starts.
        ticks: between the end of a sample and the use of its verdict.
    """

    def __init__(
        self,
        buffer: ExperienceBuffer,
        calls: PolicyCalls,
        scorer: AnyScorer,
        turns: Turns,
        samples: Sequence[SampleKey],
        ticks: int,
    ):
        self._buffer, self._calls = buffer, calls
        self._scorer, self._turns, self._ticks = scorer, turns, ticks
        self._started, self._running = set(samples), set(samples)
        self._ended: deque[list[SampleKey]] = deque()  # of the last ticks, undecided
        self._early: dict[SampleKey, Score] = {}  # verdicts before their tick

    def __call__(self, done: Sequence[Rollout]) -> list[SampleKey]:
        """Returns the samples that start now; `done` ended in this tick, and were submitted."""
        self._ended.append([rollout.key for rollout in done])
        self._running.difference_update(self._ended[-1])
        due: set[SampleKey] = set()
        while self._ended and (len(self._ended) > self._ticks or not self._running):
            due.update(self._ended.popleft())
        if not due:
            return []
        self._judge(due)
        new = [
            key
            for group, size in self._calls.sizes().items()
            for key in (SampleKey(*group, index) for index in range(size))
            if key not in self._started and key not in self._buffer.samples
        ]
        self._started.update(new)
        self._running.update(new)
        return new

    def close(self) -> None:
        """Stores the verdicts that came before their tick."""
        self._store(set(self._early))

    def _judge(self, keys: set[SampleKey]) -> None:
        """Waits for the verdicts on finished samples, and stores them."""
        while keys - self._early.keys():
            self._early.update(self._scorer.collect(block=True))
        self._store(keys)

    def _store(self, keys: set[SampleKey]) -> None:
        buffer = self._buffer
        for key in sorted(keys):
            score = self._early.pop(key)
            rollout, verdict = self._turns.settled(buffer.samples[key].rollout, score)
            if verdict is None:  # an environment answered: its next turn is of a later round
                buffer.put(rollout, done=False)
            else:
                buffer.judge(key, verdict)
