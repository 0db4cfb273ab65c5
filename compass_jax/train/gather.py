"""Samples and scores of prompts, in rounds of their own where uniform groups grow (stage 2 of the zero-variance elimination).

A round decodes what is missing while the verifiers score what has finished. With `rl.zero_variance.grow_to`, further rounds wait
for the scores, double the samples of each uniform group, until none is uniform or may grow. `grow_temperature` above 1 lets each
doubling look further; its log-probs are those of its own temperature, which rl.correction weighs against the policy's. A group is
decided when its last sample is scored, so the rounds depend on results alone, never on a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from compass_jax.config import RLConfig
from compass_jax.records import Group, Prompt, Rollout, Score
from compass_jax.rewards.score import Scorer
from compass_jax.rl.grouping import UNIFORM_WITHIN
from compass_jax.rollout.collect import Collection, RolloutStats
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose


class Samples(NamedTuple):
    """Finished samples by row, the store with the routes of these rows (None: not replayed), and the scores of those that have one.

    Row n * capacity + c: sample c of prompt n.
    """

    rollouts: dict[int, Rollout]
    store: jax.Array | None = None
    scores: Mapping[int, Score] = MappingProxyType({})


class Interrupted(Exception):
    """SIGTERM arrived during a rollout; carries what had finished."""

    def __init__(self, samples: Samples):
        super().__init__("stopped on request")
        self.samples = samples


@dataclass
class Account:
    """What a step's rollout cost and did, over all its rounds. `counts` are exact and survive a restart; times and rates do not."""

    stats: RolloutStats = field(default_factory=RolloutStats)
    waited_s: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, counts: dict[str, float]) -> None:
        """Adds counts by name."""
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        """By their public names."""
        return {**self.stats.metrics(), "time/reward_wait_s": self.waited_s, **self.counts}


def known_rewards(scores: Sequence[Score]) -> list[float]:
    """The rewards that a verifier gave."""
    return [score.reward for score in scores if score.known]


def is_uniform(scores: Sequence[Score]) -> bool:
    """Whether at least two rewards are known and all known ones are equal within 1e-6."""
    known = known_rewards(scores)
    return len(known) >= 2 and max(known) - min(known) <= UNIFORM_WITHIN


class Gatherer:
    """Samples and scores groups, verifiers overlapped with decoding."""

    def __init__(self, engine: Engine, scorer: Scorer, decode_text, stop, config: RLConfig, seed: int, expected_length: Callable[[Prompt], float]):
        self.engine, self.scorer, self.decode_text, self.stop, self.rl, self.seed = engine, scorer, decode_text, stop, config, seed
        self.expected_length = expected_length

    def __call__(self, params: Any, prompts: Sequence[Prompt], policy_version: int, have: Samples, account: Account) -> tuple[list[Group], Any]:
        """The groups in the order of the prompts, and the routing store of their rows.

        `have` holds what an interrupted call had; the rounds are the same with it. Raises Interrupted when a stop is requested
        before all samples of a round are there.
        """
        capacity, finished, store = self.rl.capacity, dict(have.rollouts), have.store
        asked = [self.rl.group_size] * len(prompts)
        scores = dict(have.scores)  # a verdict stands: one that depended on a clock could be another the next time
        sampler = self.engine.default_sampler()
        for row in finished.keys() - scores.keys():
            self._submit(row, finished[row])
        while True:
            rows = [range(n * capacity, n * capacity + k) for n, k in enumerate(asked)]
            missing = {row for group in rows for row in group if row not in finished}
            if missing:
                store = self._sample(params, prompts, policy_version, missing, Samples(finished, store, scores), account.stats, sampler)
            started = time.perf_counter()
            while any(row not in scores for row in finished):
                scores.update(self.scorer.collect(block=True))
            account.waited_s += time.perf_counter() - started
            growing = [n for n, group in enumerate(rows) if asked[n] < capacity and is_uniform([scores[row] for row in group])]
            if not growing:
                break
            for n in growing:
                asked[n] = min(2 * asked[n], capacity)
            sampler = replace(sampler, temperature=sampler.temperature * self.rl.zero_variance.grow_temperature)
        groups = [
            Group(p, tuple(finished[r] for r in group), tuple(scores[r] for r in group)) for p, group in zip(prompts, rows, strict=True)
        ]
        account.add(self._growth(groups))
        return groups, store

    def _sample(self, params, prompts, policy_version: int, missing: set[int], have: Samples, stats, sampler):
        """Adds the missing rows to `have.rollouts`; returns the routing store."""
        capacity, finished = self.rl.capacity, have.rollouts
        collection = Collection(
            self.engine, params, prompts, capacity, Purpose.TRAIN, self.seed, policy_version=policy_version, stats=stats,
            sampler=sampler, keep_routing=self.rl.replay == "R3", store=have.store, finished=frozenset(range(len(prompts) * capacity)) - missing,
            expected=[self.expected_length(prompt) for prompt in prompts],
        )  # fmt: skip
        for rollout in collection:
            finished[rollout.row] = rollout
            self._submit(rollout.row, rollout)
            if self.stop.requested:
                break
        if self.stop.requested and not missing.issubset(finished):
            raise Interrupted(Samples(finished, collection.store if self.rl.replay == "R3" else None, have.scores))
        return collection.store

    def _submit(self, row: int, rollout: Rollout) -> None:
        self.scorer.submit(row, rollout.prompt, partial(self.decode_text, rollout.response))

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
