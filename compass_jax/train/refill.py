"""One step's rollout. With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) in rounds, until
enough groups vary.

    a round     dynamic_batch * prompts_per_step prompts are rolled out; groups with at least two
                known rewards that differ are kept
    the end     prompts_per_step groups are kept, or dynamic_rounds rounds are over: uniform groups
                of the last round fill the rest

Kept groups move to the front store as they come, so that only they and one round's groups are held.
What is dropped (uniform groups, and varied ones that came too late) is counted and remembered: its
prompts' history is as good as any other's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from compass_jax.config import RewardConfig, RLConfig
from compass_jax.model.moe import unset_id
from compass_jax.model.routes import put_routes, take_routes
from compass_jax.records import Group, Outcome, Prompt
from compass_jax.train.gather import (
    Account,
    Gatherer,
    Interrupted,
    Samples,
    is_uniform,
    known_rewards,
)
from compass_jax.train.history import outcome

Results = list[tuple[Prompt, Outcome]]
Load = Callable[[list[Prompt], list[Prompt]], "Unfinished"]


@dataclass
class Progress:
    """The finished rounds of an interrupted step, as JSON (`dataclasses.asdict`)."""

    rounds: int = 0
    # [round, place in it] of each kept group, in the order of the front store
    kept: list[list[int]] = field(default_factory=list)
    # [round, place, *Outcome] of each other group
    dropped: list[list] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)


class Unfinished(NamedTuple):
    """What an interrupted step leaves to its continuation; also a step's whole rollout that nobody
    has trained on yet.
    """

    progress: Progress
    front: Samples  # of the kept groups
    current: Samples  # of the round that was interrupted
    # of `current`, where they are carried and not drawn again (train/partial.py)
    prompts: list[Prompt] | None = None


class StepInterrupted(Exception):
    """SIGTERM arrived during a step's rollout; carries what had finished."""

    def __init__(self, left: Unfinished):
        super().__init__("stopped on request")
        self.left = left


class Gathered(NamedTuple):
    """The groups to train on, their routes by row of the store (row n * capacity + c: sample c of
    group n), all groups' outcomes, metrics.
    """

    groups: list[Group]
    store: Any
    results: Results
    dropped_tokens: int  # generated for groups that are not trained on
    metrics: dict[str, float]
    progress: Progress = Progress()
    rest: Unfinished | None = None  # partial rollouts: what goes on in the next step
    # and that with this step's groups, where it may have to be saved
    in_flight: Unfinished | None = None

    def left(self, replayed: bool) -> Unfinished:
        """As an interrupted step would leave it, with nothing missing. `replayed`: the routes
        belong to it.
        """
        if self.in_flight is not None:
            return self.in_flight
        samples = _samples(self.groups, self.store if replayed else None)
        return (
            Unfinished(self.progress, samples, Samples({}))
            if self.progress.rounds
            else Unfinished(self.progress, Samples({}), samples)
        )


def _samples(groups: list[Group], store) -> Samples:
    """All samples of whole groups, with their scores."""
    pairs = [pair for group in groups for pair in zip(group.rollouts, group.scores, strict=True)]
    return Samples(
        {rollout.row: rollout for rollout, _ in pairs},
        store,
        {rollout.row: score for rollout, score in pairs},
    )


class Refill:
    """Draws prompts and rolls them out until a step has its groups."""

    def __init__(self, gather: Gatherer, config: RLConfig, rewards: RewardConfig):
        self.gather, self.rl, self.rewards = gather, config, rewards

    def __call__(
        self,
        params: Any,
        draw: Callable[[int], list[Prompt]],
        policy_version: int,
        progress: Progress,
        load: Load | None,
    ) -> Gathered:
        """The step's groups. `draw(n)` gives the next n prompts, the same ones again after a
        restart.

        An interrupted step goes on with its `progress` and with `load(prompts of the kept groups,
        prompts of the round)`, the samples that it had; a new one has an empty progress and no
        `load`. Raises StepInterrupted.
        """
        earlier = [draw(self.rl.prompts_per_round) for _ in range(progress.rounds)]
        whole = len(progress.kept) == self.rl.prompts_per_step
        prompts = [] if whole else draw(self.rl.prompts_per_round)
        kept = [earlier[r][place] for r, place in progress.kept]
        left = (
            Unfinished(progress, Samples({}), Samples({})) if load is None else load(kept, prompts)
        )
        account, current = Account(counts=dict(progress.counts)), left.current
        groups = (
            self.gather(params, kept, policy_version, left.front, Account()).groups if kept else []
        )
        rounds = _Rounds(self.rl, self.rewards, progress, groups, left.front.store, earlier)
        if whole:
            return rounds.gathered(account)
        while True:
            try:
                groups, _, (_, store, *_) = self.gather(
                    params, prompts, policy_version, current, account
                )
            except Interrupted as interrupted:
                raise StepInterrupted(rounds.unfinished(interrupted.samples)) from interrupted
            if not self.rl.zero_variance.dynamic_sampling:
                return Gathered(
                    groups,
                    store,
                    [(g.prompt, outcome(g, self.rewards)) for g in groups],
                    0,
                    account.metrics(),
                )
            rounds.take(prompts, groups, store, account.counts)
            if rounds.complete:
                return rounds.gathered(account)
            prompts, current = draw(self.rl.prompts_per_round), Samples({})


class _Rounds:
    """The kept groups of a step's rounds, their routes in the front store, and the account of the
    others.
    """

    def __init__(
        self,
        config: RLConfig,
        rewards: RewardConfig,
        progress: Progress,
        kept: list[Group],
        store,
        prompts: list[list[Prompt]],
    ):
        self.rl, self.rewards, self.progress, self.kept, self.store, self.prompts = (
            config,
            rewards,
            progress,
            kept,
            store,
            prompts,
        )

    @property
    def complete(self) -> bool:
        return len(self.kept) == self.rl.prompts_per_step

    def take(
        self, prompts: list[Prompt], groups: list[Group], store, counts: dict[str, float]
    ) -> None:
        """Keeps what a finished round has to keep; after the last round, uniform groups fill what
        is missing.
        """
        number, wanted = self.progress.rounds, self.rl.prompts_per_step
        self.prompts.append(prompts)
        varied = [
            n
            for n, group in enumerate(groups)
            if len(known_rewards(group.scores)) >= 2 and not is_uniform(group.scores)
        ]
        chosen = varied[: wanted - len(self.kept)]
        missing = wanted - len(self.kept) - len(chosen)
        if number + 1 == self.rl.zero_variance.dynamic_rounds:
            chosen += [n for n in range(len(groups)) if n not in set(chosen)][:missing]
            self._count("filled_groups", missing, counts)
        self._move(chosen, groups, store)
        self.progress.kept += [[number, n] for n in chosen]
        dropped = [n for n in range(len(groups)) if n not in set(chosen)]
        self.progress.dropped += [[number, n, *outcome(groups[n], self.rewards)] for n in dropped]
        self.progress.rounds += 1
        self._count("rounds", 1, counts)
        self._count("surplus_groups", len(set(varied) - set(chosen)), counts)
        self._count("dropped_groups", len(dropped), counts)
        self._count(
            "dropped_tokens",
            sum(r.response_length for n in dropped for r in groups[n].rollouts),
            counts,
        )
        self.progress.counts = dict(counts)

    @staticmethod
    def _count(name: str, value: float, counts: dict[str, float]) -> None:
        name = f"zero_variance/dynamic_{name}"
        counts[name] = counts.get(name, 0.0) + float(value)

    def _move(self, chosen: list[int], groups: list[Group], store) -> None:
        """Chosen groups go behind the kept ones; their routes are copied on the device."""
        capacity, total = self.rl.capacity, self.rl.prompts_per_step * self.rl.capacity
        source, target = (
            np.full(total, np.iinfo(np.int32).max, np.int32),
            np.full(total, total, np.int32),
        )
        for at, n in enumerate(chosen):
            first = (len(self.kept) + at) * capacity
            place = slice(at * capacity, (at + 1) * capacity)
            source[place], target[place] = (
                n * capacity + np.arange(capacity),
                first + np.arange(capacity),
            )
        if store is not None:
            front = (
                self.store
                if self.store is not None
                else jnp.full((total, *store.shape[1:]), unset_id(store.dtype), store.dtype)
            )
            self.store = put_routes(
                front, jnp.asarray(target), take_routes(store, jnp.asarray(source), store.shape[1])
            )
        for n in chosen:
            first = len(self.kept) * capacity
            rollouts = tuple(
                dataclasses.replace(r, row=first + r.sample) for r in groups[n].rollouts
            )
            self.kept.append(dataclasses.replace(groups[n], rollouts=rollouts))

    def unfinished(self, current: Samples) -> Unfinished:
        return Unfinished(self.progress, _samples(self.kept, self.store), current)

    def gathered(self, account: Account) -> Gathered:
        found = {(r, n): Outcome(*rest) for r, n, *rest in self.progress.dropped}
        found |= {
            (r, n): outcome(group, self.rewards)
            for (r, n), group in zip(self.progress.kept, self.kept, strict=True)
        }
        results = [(self.prompts[r][n], found[r, n]) for r, n in sorted(found)]
        dropped = int(account.counts["zero_variance/dynamic_dropped_tokens"])
        return Gathered(self.kept, self.store, results, dropped, account.metrics(), self.progress)
