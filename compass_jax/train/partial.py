"""Partial rollouts: the longest samples of a step do not hold it up (APRIL, arXiv 2509.18521).

    in flight   prompts_per_step + partial_prompts prompts: those carried from the step before, then
                new ones
    a step      ends its rollout at the tick at which prompts_per_step groups are whole, and trains
                on them
    the rest    is carried: finished samples with their scores, cut ones with their tokens,
                log-probs, versions and routes

A cut sample goes on in the next step under the new weights: a prefill over its tokens, with their
own routes, and then as ever. What it had keeps the log-probs and the policy version under which it
was sampled, and rl.correction weighs it. The last step of a run takes no prompts beyond its own, so
that nothing is left over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from compass_jax.config import RewardConfig, RLConfig
from compass_jax.model.routes import take_routes
from compass_jax.records import Group, Prompt
from compass_jax.train.gather import Account, Gatherer, Interrupted, Sampled, Samples
from compass_jax.train.history import outcome
from compass_jax.train.refill import Gathered, Progress, StepInterrupted, Unfinished

SKIPPED = "zero_variance/skipped_prompts"


def unfinished(samples: Samples, prompts: list[Prompt], progress: Progress) -> Unfinished:
    """What is in flight of these prompts."""
    return Unfinished(progress, Samples({}), samples, prompts)


class PartialRollouts:
    """Rolls out the prompts in flight until a step has its groups."""

    def __init__(self, gather: Gatherer, config: RLConfig, rewards: RewardConfig):
        self.gather, self.rl, self.rewards = gather, config, rewards

    def __call__(
        self,
        params: Any,
        draw: Callable[[int], list[Prompt]],
        policy_version: int,
        carried: Unfinished | None,
        last: bool,
        skipped: Callable[[], int] = lambda: 0,
    ) -> Gathered:
        """The step's groups, and in `rest` what goes on later. `draw(n)` gives the next n prompts;
        `last`: no step comes after this one.

        `skipped()`: prompts that drawing has passed over, a metric that an interrupted step takes
        along. Raises StepInterrupted, with everything that is in flight.
        """
        in_flight = self.rl.prompts_per_step if last else self.rl.prompts_per_round
        before, have = ((), Samples({})) if carried is None else (carried.prompts, carried.current)
        prompts = [*before, *draw(max(0, in_flight - len(before)))]
        account = Account(
            counts={
                SKIPPED: float(skipped())
                + (carried.progress.counts.get(SKIPPED, 0.0) if carried else 0.0)
            }
        )
        progress = Progress(counts=dict(account.counts))
        if have.store is None and self.rl.replay == "R3":
            have = have._replace(
                store=self.gather.engine.new_store(self.rl.prompts_per_round * self.rl.capacity)
            )
        try:
            sampled = self.gather(
                params, prompts, policy_version, have, account, self.rl.prompts_per_step
            )
        except Interrupted as interrupted:
            raise StepInterrupted(
                unfinished(interrupted.samples, prompts, progress)
            ) from interrupted
        groups, store = self._chosen(sampled)
        rest = self._rest(sampled, prompts)
        waiting = [*rest.current.rollouts.values(), *rest.current.begun.values()]
        account.add(
            {
                "rollout/carried_groups": float(len(rest.prompts)),
                "rollout/carried_tokens": float(sum(r.response_length for r in waiting)),
            }
        )
        results = [(group.prompt, outcome(group, self.rewards)) for group in groups]
        whole = unfinished(sampled.samples, prompts, progress) if self.rl.one_step_off else None
        return Gathered(groups, store, results, 0, account.metrics(), rest=rest, in_flight=whole)

    def _chosen(self, sampled: Sampled) -> tuple[list[Group], Any]:
        """The groups and their routes, renumbered: row n * capacity + c is sample c of the n-th of
        them.
        """
        capacity, groups = self.rl.capacity, []
        for n, group in enumerate(sampled.groups):
            rollouts = tuple(
                dataclasses.replace(r, row=n * capacity + r.sample) for r in group.rollouts
            )
            groups.append(dataclasses.replace(group, rollouts=rollouts))
        return groups, self._take(sampled.samples.store, sampled.places, self.rl.prompts_per_step)

    def _rest(self, sampled: Sampled, prompts: Sequence[Prompt]) -> Unfinished:
        """The other prompts and their samples, renumbered."""
        capacity, samples, chosen = self.rl.capacity, sampled.samples, set(sampled.places)
        places = [n for n in range(len(prompts)) if n not in chosen]
        new = {
            n * capacity + c: at * capacity + c
            for at, n in enumerate(places)
            for c in range(capacity)
        }
        moved = [
            {
                new[row]: dataclasses.replace(rollout, row=new[row])
                for row, rollout in part.items()
                if row in new
            }
            for part in (samples.rollouts, samples.begun)
        ]
        scores = {new[row]: score for row, score in samples.scores.items() if row in new}
        store = self._take(samples.store, places, self.rl.prompts_per_round)
        return unfinished(
            Samples(moved[0], store, scores, moved[1]), [prompts[n] for n in places], Progress()
        )

    def _take(self, store: Any, places: Sequence[int], groups: int) -> Any:
        """The routes of the groups at `places`, in a store for `groups`."""
        if store is None:
            return None
        rows = np.full((groups, self.rl.capacity), np.iinfo(np.int32).max, np.int32)
        rows[: len(places)] = np.asarray(places, np.int32)[:, None] * self.rl.capacity + np.arange(
            self.rl.capacity
        )
        return take_routes(store, jnp.asarray(rows.reshape(-1)), store.shape[1])
