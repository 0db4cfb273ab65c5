"""Replay of groups: recent groups whose rewards vary take the places of uniform groups in an update
(arXiv 2506.05316, 2606.01281).

Everything here is a function of the buffer, the policy's version and the step, so that a stop
changes no choice and all processes make the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from compass_jax.config import RewardConfig
from compass_jax.config.sampling import GroupReplayConfig
from compass_jax.experience.buffer import ExperienceBuffer
from compass_jax.experience.growth import known_rewards, varies
from compass_jax.experience.history import outcome
from compass_jax.records import Group, Outcome

DRAW = 19  # the purpose of these draws in their key


@dataclass(frozen=True)
class UpdateGroups:
    """The groups that a step trains on, in the places of the groups that it sampled."""

    groups: list[Group]
    ages: dict[int, int] = field(default_factory=dict)  # place -> age of the replayed group there
    replaced: list[Group] = field(default_factory=list)  # sampled groups that have no place

    def live(self, max_route_age: int) -> list[int]:
        """Returns the places of the replayed groups that are routed live."""
        return [place for place, age in self.ages.items() if age > max_route_age]

    def replaced_outcomes(self, rewards: RewardConfig) -> list[Outcome]:
        """Returns the outcomes of the replaced groups."""
        return [outcome(group, rewards) for group in self.replaced]

    def metrics(self, stored: int) -> dict[str, float]:
        """Returns the number of replayed groups, their tokens and mean age, the uniform groups that
        kept their places, and the number of `stored` groups.
        """
        uniform = sum(not varies(group) for group in self.groups)
        ages = list(self.ages.values())
        tokens = sum(_generated_tokens(self.groups[place]) for place in self.ages)
        return {
            "group_replay/groups": float(len(ages)),
            "group_replay/tokens": float(tokens),
            "group_replay/unfilled_groups": float(uniform),
            "group_replay/stored_groups": float(stored),
            **({"group_replay/age": float(np.mean(ages))} if ages else {}),
        }


def age_of(group: Group, version: int) -> int:
    """Returns the number of the policy's updates, up to `version`, since the oldest weights that
    sampled a token of the group.
    """
    return version - min(
        int(x.versions[len(x.prompt.tokens) :][x.generated].min()) for x in group.rollouts
    )


def update_groups(
    groups: Sequence[Group],
    stored: Sequence[Group],
    version: int,
    config: GroupReplayConfig,
    key: tuple[int, int],
) -> UpdateGroups:
    """Replaces sampled groups that do not vary by stored ones, in their order, as long as there are
    any that are at most `config.max_age` updates old. The others keep their places.

    Stored groups are drawn one after the other without replacement, each with a probability
    proportional to

        variance of its known rewards * (max_age + 1 - age)

    Args:
        groups: the groups that the step sampled.
        stored: the groups that may be replayed.
        version: the policy's version before the update.
        key: (the run's seed, the step), which keys the draws.
    """
    ages = [age_of(group, version) for group in stored]
    young = [i for i, age in enumerate(ages) if age <= config.max_age]
    weights = np.array(
        [np.var(known_rewards(stored[i].scores)) * (config.max_age + 1 - ages[i]) for i in young]
    )
    # Stored groups vary and these are young enough, so every weight is positive.
    # The first arrivals of independent Poisson processes with these rates are such a draw
    # (Efraimidis and Spirakis 2006).
    seed, step = key
    arrivals = np.random.default_rng((seed, DRAW, step)).exponential(size=len(young)) / weights
    places = [place for place, group in enumerate(groups) if not varies(group)]
    chosen = {place: young[int(n)] for place, n in zip(places, np.argsort(arrivals, kind="stable"))}
    return UpdateGroups(
        [stored[chosen[place]] if place in chosen else x for place, x in enumerate(groups)],
        {place: ages[i] for place, i in chosen.items()},
        [groups[place] for place in chosen],
    )


def store_groups(buffer: ExperienceBuffer, version: int, config: GroupReplayConfig) -> None:
    """Stores the step's own groups that vary, and discards the oldest groups beyond
    `config.groups` and those that are too old at `version`.
    """
    of_step = {key: buffer.group(key) for key in buffer.kept}
    # In the order of their steps: groups that are stored already come before this step's.
    candidates = buffer.stored | {key: group for key, group in of_step.items() if varies(group)}
    young = [key for key, group in candidates.items() if age_of(group, version) <= config.max_age]
    newest = set(young[-config.groups :])
    # First, because newly stored groups may take the rows that this frees.
    buffer.discard([key for key in buffer.stored if key not in newest])
    buffer.store([key for key in of_step if key in newest])


def _generated_tokens(group: Group) -> int:
    return sum(int(rollout.generated.sum()) for rollout in group.rollouts)
