"""Samples and scores of prompts, in rounds of their own where uniform groups grow (stage 2 of the
zero-variance elimination).

A round decodes what is missing while the verifiers score what has finished. With
`rl.zero_variance.grow_to`, further rounds wait for the scores, double the samples of each uniform
group, until none is uniform or may grow. `grow_temperature` above 1 lets each doubling look
further; its log-probs are those of its own temperature, which rl.correction weighs against the
policy's. A group is decided when its last sample is scored, so the rounds depend on results alone,
never on a clock. With `rl.partial_prompts` a round ends when enough groups are whole; what the
others have so far goes on in the next round or step.
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

ANY = 64  # doublings: more than a group can have


class Samples(NamedTuple):
    """Samples by row, the store with the routes of these rows (None: not replayed), and the scores
    of those that have one.

    Row n * capacity + c: sample c of prompt n.
    """

    rollouts: dict[int, Rollout]
    store: jax.Array | None = None
    scores: Mapping[int, Score] = MappingProxyType({})
    begun: Mapping[int, Rollout] = MappingProxyType({})  # and not finished


class Sampled(NamedTuple):
    """Whole groups, the places of their prompts, and all samples, those of the other
    prompts too.
    """

    groups: list[Group]
    places: list[int]
    samples: Samples


class Interrupted(Exception):
    """SIGTERM arrived during a rollout; carries what had finished, and with partial rollouts what
    had begun.
    """

    def __init__(self, samples: Samples):
        super().__init__("stopped on request")
        self.samples = samples


@dataclass
class Account:
    """What a step's rollout cost and did, over all its rounds. `counts` are exact and survive a
    restart; times and rates do not.
    """

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


def _whole(rows: Sequence[range], now: Samples) -> int:
    """How many groups have all their rows."""
    return sum(all(row in now.rollouts for row in group) for group in rows)


def _uniform_so_far(now: Samples, rows: Sequence[int]) -> bool:
    return all(row in now.scores for row in rows) and is_uniform([now.scores[row] for row in rows])


def is_uniform(scores: Sequence[Score]) -> bool:
    """Whether at least two rewards are known and all known ones are equal within 1e-6."""
    known = known_rewards(scores)
    return len(known) >= 2 and max(known) - min(known) <= UNIFORM_WITHIN


class Gatherer:
    """Samples and scores groups, verifiers overlapped with decoding."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        decode_text,
        stop,
        config: RLConfig,
        seed: int,
        expected_length: Callable[[Prompt], float],
    ):
        self.engine, self.scorer, self.decode_text, self.stop, self.rl, self.seed = (
            engine,
            scorer,
            decode_text,
            stop,
            config,
            seed,
        )
        self.expected_length = expected_length

    def __call__(
        self,
        params: Any,
        prompts: Sequence[Prompt],
        policy_version: int,
        have: Samples,
        account: Account,
        wanted: int | None = None,
    ) -> Sampled:
        """The first `wanted` groups that are whole (None: all), in the order of the prompts.

        `have` holds what an earlier call had; without partial rollouts the rounds are the same with
        it. Raises Interrupted when a stop is requested before all samples of a round are there.
        """
        wanted = len(prompts) if wanted is None else wanted
        # a verdict stands: one that depended on a clock could change
        now = have._replace(rollouts=dict(have.rollouts), scores=dict(have.scores))
        for row in now.rollouts.keys() - now.scores.keys():
            self._submit(row, now.rollouts[row])
        # groups that were carried may be further than others; without them all are in one round
        doublings = ANY if self.rl.partial_prompts else 0
        rows = self._rows(len(prompts), now, doublings)
        while True:
            if _whole(rows, now) < wanted:
                now = self._sample(
                    params, prompts, policy_version, rows, wanted, now, doublings, account.stats
                )
            self._wait(now, account)
            doublings += 1
            before, rows = rows, self._rows(len(prompts), now, doublings)
            # a doubling that `have` held whole may be uniform and grow again
            if rows == before and _whole(rows, now) >= wanted:
                break
        places = [n for n, group in enumerate(rows) if now.rollouts.keys() >= set(group)][:wanted]
        groups = [
            Group(
                prompts[n],
                tuple(now.rollouts[r] for r in rows[n]),
                tuple(now.scores[r] for r in rows[n]),
            )
            for n in places
        ]
        account.add(self._growth(groups))
        return Sampled(groups, places, now)

    def _rows(self, groups: int, now: Samples, doublings: int) -> list[range]:
        """The rows that each group asks for: `group_size`, up to `doublings` times twice as many
        while all are scored and uniform.
        """
        out = []
        for first in range(0, groups * self.rl.capacity, self.rl.capacity):
            size, left = self.rl.group_size, doublings
            while (
                left
                and size < self.rl.capacity
                and _uniform_so_far(now, range(first, first + size))
            ):
                size, left = min(2 * size, self.rl.capacity), left - 1
            out.append(range(first, first + size))
        return out

    def _wait(self, now: Samples, account: Account) -> None:
        """Until every finished sample has its score."""
        started = time.perf_counter()
        while now.rollouts.keys() - now.scores.keys():
            now.scores.update(self.scorer.collect(block=True))
        account.waited_s += time.perf_counter() - started

    def _sample(
        self,
        params,
        prompts,
        policy_version: int,
        rows: list[range],
        wanted: int,
        now: Samples,
        doublings: int,
        stats,
    ) -> Samples:
        """Adds to `now.rollouts` what is missing of `rows`, until `wanted` groups are whole."""
        missing = {row for group in rows for row in group if row not in now.rollouts}
        sampler, hotter = self.engine.default_sampler(), self.rl.zero_variance.grow_temperature
        collection = Collection(
            self.engine,
            params,
            prompts,
            self.rl.capacity,
            Purpose.TRAIN,
            self.seed,
            policy_version=policy_version,
            stats=stats,
            sampler=replace(sampler, temperature=sampler.temperature * hotter**doublings),
            keep_routing=self.rl.replay == "R3",
            store=now.store,
            finished=frozenset(range(len(prompts) * self.rl.capacity)) - missing,
            carried={row: rollout for row, rollout in now.begun.items() if row in missing},
            enough=lambda: self.stop.requested or _whole(rows, now) >= wanted,
            expected=[self.expected_length(prompt) for prompt in prompts],
        )
        for rollout in collection:
            now.rollouts[rollout.row] = rollout
            self._submit(rollout.row, rollout)
        now = now._replace(
            begun=collection.cut() if self.rl.partial_prompts else {}, store=collection.store
        )
        if self.stop.requested and _whole(rows, now) < wanted:
            raise Interrupted(now)
        return now

    def _submit(self, row: int, rollout: Rollout) -> None:
        self.scorer.submit(row, rollout.prompt, partial(self.decode_text, rollout.response))

    def _growth(self, groups: Sequence[Group]) -> dict[str, float]:
        """What stage 2 did: groups that grew, those of them that vary now, and the tokens that it
        cost.
        """
        if not self.rl.zero_variance.grow_to:
            return {}
        first = self.rl.group_size
        grown = [group for group in groups if len(group.rollouts) > first]
        return {
            "zero_variance/grown_groups": float(len(grown)),
            "zero_variance/grow_rescued_groups": float(
                sum(not is_uniform(group.scores) for group in grown)
            ),
            "zero_variance/grow_tokens": float(
                sum(r.response_length for group in grown for r in group.rollouts[first:])
            ),
        }
