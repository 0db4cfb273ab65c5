"""A step's groups: samples of every prompt, scored as they finish; a group that is uniform gets more (stage 2).

Rounds: sample what is missing, wait for the scores, double the samples of each uniform group, until none is uniform or may
grow. A group is decided when its last sample is scored, so the rounds depend on results alone, never on a clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from compass_jax.config import RLConfig
from compass_jax.records import Group, Prompt, Rollout, Score
from compass_jax.rewards.score import Scorer
from compass_jax.rl.grouping import UNIFORM_WITHIN
from compass_jax.rollout.collect import Collection, RolloutStats
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose


class Interrupted(Exception):
    """SIGTERM arrived during a rollout; carries what had finished."""

    def __init__(self, finished: dict[int, Rollout], store: jax.Array | None):
        super().__init__("stopped on request")
        self.finished, self.store = finished, store


class Gathered(NamedTuple):
    """Groups in the order of the prompts, their routes by row of the store (row n * capacity + c: sample c of prompt n), metrics."""

    groups: list[Group]
    store: jax.Array | None
    metrics: dict[str, float]


def is_uniform(scores: Sequence[Score]) -> bool:
    """Whether at least two rewards are known and all known ones are equal within 1e-6."""
    known = [score.reward for score in scores if score.known]
    return len(known) >= 2 and max(known) - min(known) <= UNIFORM_WITHIN


class Gatherer:
    """Samples and scores the groups of one step, verifiers overlapped with decoding."""

    def __init__(self, engine: Engine, scorer: Scorer, decode_text, stop, config: RLConfig, seed: int):
        self.engine, self.scorer, self.decode_text, self.stop, self.rl, self.seed = engine, scorer, decode_text, stop, config, seed

    def __call__(
        self, params: Any, prompts: Sequence[Prompt], policy_version: int, finished: dict[int, Rollout] | None = None, store: jax.Array | None = None
    ) -> Gathered:
        """Raises Interrupted when a stop is requested before all samples of a round are there.

        `finished` and `store` hold what an interrupted step had; the rounds are the same with them.
        """
        capacity, finished = self.rl.capacity, dict(finished or {})
        asked = [self.rl.group_size] * len(prompts)
        scores: dict[int, Score] = {}
        stats, waited = RolloutStats(), 0.0
        for row, rollout in finished.items():
            self._submit(row, rollout)
        while True:
            rows = [range(n * capacity, n * capacity + k) for n, k in enumerate(asked)]
            missing = {row for group in rows for row in group if row not in finished}
            if missing:
                store = self._sample(params, prompts, policy_version, missing, finished, store, stats)
            started = time.perf_counter()
            while any(row not in scores for group in rows for row in group):
                scores.update(self.scorer.collect(block=True))
            waited += time.perf_counter() - started
            growing = [n for n, group in enumerate(rows) if asked[n] < capacity and is_uniform([scores[row] for row in group])]
            if not growing:
                break
            for n in growing:
                asked[n] = min(2 * asked[n], capacity)
        groups = [
            Group(p, tuple(finished[r] for r in group), tuple(scores[r] for r in group)) for p, group in zip(prompts, rows, strict=True)
        ]
        return Gathered(groups, store, {**stats.metrics(), "time/reward_wait_s": waited, **self._growth(groups)})

    def _sample(self, params, prompts, policy_version: int, missing: set[int], finished: dict[int, Rollout], store, stats: RolloutStats):
        """Adds the missing rows to `finished`; returns the routing store."""
        capacity = self.rl.capacity
        collection = Collection(
            self.engine, params, prompts, capacity, Purpose.TRAIN, self.seed, policy_version=policy_version, stats=stats,
            keep_routing=self.rl.replay == "R3", store=store, finished=frozenset(range(len(prompts) * capacity)) - missing,
        )  # fmt: skip
        for rollout in collection:
            finished[rollout.row] = rollout
            self._submit(rollout.row, rollout)
            if self.stop.requested:
                break
        if self.stop.requested and not missing.issubset(finished):
            raise Interrupted(finished, collection.store if self.rl.replay == "R3" else None)
        return collection.store

    def _submit(self, row: int, rollout: Rollout) -> None:
        self.scorer.submit(row, rollout.prompt, self.decode_text(rollout.response))

    def _growth(self, groups: Sequence[Group]) -> dict[str, float]:
        """What stage 2 did: groups that grew, those of them that vary now, and the tokens that it cost."""
        if not self.rl.zero_variance.grow_to:
            return {}
        first = self.rl.group_size
        grown = [group for group in groups if len(group.rollouts) > first]
        return {
            "zero_variance/grown_groups": float(len(grown)),
            "zero_variance/grow_rescued_groups": float(sum(not is_uniform(group.scores) for group in grown)),
            "zero_variance/grow_tokens": float(sum(r.response_length for group in grown for r in group.rollouts[first:])),
        }
