"""Replay of groups: recent groups whose rewards vary take the places of groups whose rewards are
all equal (arXiv 2506.05316, 2606.01281).

    compass train tiny_reasoning_cpu --rl.correction tis --rl.step-policy none \
        --rl.hooks '[{"name": "examples/group_replay.py:GroupReplay", "groups": 8}]'

A group's age is the number of the policy's updates since the oldest weights that sampled a token of
it. Everything here is a function of the held groups, the policy's version and the step, so that a
stop changes no choice and all processes make the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from compass_jax.base.records import Group
from compass_jax.config import RLConfig, StepHook
from compass_jax.config.errors import check
from compass_jax.config.ranges import Count, CountOrOff, Range
from compass_jax.experience.growth import known_rewards, varies
from compass_jax.training.hooks.base import StepRecord

DRAW = 19  # the purpose of these draws in their key


@dataclass(frozen=True)
class GroupReplay(StepHook):
    """Holds the newest groups whose rewards vary, and trains on some of them in the places of
    uniform ones; needs rl.correction.
    """

    groups: Annotated[int, Range(1, 65_536)] = 16
    """Maximum number of groups that are held, the newest ones."""
    max_age: Count = 4
    """Maximum age of a replayed group in updates of the policy."""
    max_route_age: CountOrOff = 0
    """Maximum age (updates of the policy) up to which a replayed group's recorded routes are
    replayed, for rl.replay = R3; older groups are routed live. 0: all are routed live, and no
    routes are kept.
    """

    @property
    def held_groups(self) -> int:
        """The largest number of groups that are held."""
        return self.groups

    @property
    def holds_routes(self) -> bool:
        """Whether routes are kept."""
        return self.max_route_age > 0

    def on_groups(self, step: StepRecord, state: dict) -> None:
        """Replaces groups that do not vary by held ones, as long as there are any that are young
        enough, and holds the newest groups that vary.
        """
        chosen = chosen_groups(step, self.max_age)
        for place, key in chosen.items():
            step.put(
                place, key, live=age_of(step.held_groups[key], step.version) > self.max_route_age
            )
        uniform = sum(not varies(group) for group in step.trained)
        ages = [age_of(step.held_groups[key], step.version) for key in chosen.values()]
        step.metrics["group_replay/unfilled_groups"] = float(uniform)
        step.metrics["group_replay/held_groups"] = float(len(step.held_groups))
        if ages:
            step.metrics["group_replay/age"] = float(np.mean(ages))
        # In the order of their steps: held groups come before this step's.
        of_step = {group.prompt.key: group for group in step.groups if varies(group)}
        candidates = {**step.held_groups, **of_step}
        young = [k for k, x in candidates.items() if age_of(x, step.version) < self.max_age]
        step.hold(young[-self.groups :])

    def check(self, rl: RLConfig) -> None:
        """Raises ConfigError for settings that cannot act or that contradict others."""
        key = f"{self.key}: GroupReplay"
        check(
            rl.correction.acts,
            f"{key} trains on tokens that older weights sampled: set rl.correction to 'tis',"
            " 'icepop' or 'sequence'",
        )
        check(
            not rl.zero_variance.rl_zvp,
            f"{key} replaces the uniform groups that rl.zero_variance.rl_zvp learns from: switch"
            " one of them off",
        )
        check(
            not rl.advantage.uniform_teaches,
            f"{key} replaces the uniform groups that rl.advantage.name = {rl.advantage.name!r}"
            " learns from: take another advantage, such as rloo",
        )
        updates = rl.updates_per_rollout * rl.epochs
        # one step off, a group is sampled before the updates of the previous step, too
        youngest = updates * (2 if rl.one_step_off else 1)
        of_step = f"a step has {updates} update{'s' if updates > 1 else ''}"
        for name in ("max_age", "max_route_age"):
            age = getattr(self, name)
            check(
                age >= youngest or (name == "max_route_age" and age == 0),
                f"{key}.{name} = {age}: {of_step}, so that no held group is younger than"
                f" {youngest}; raise it to {youngest} or more",
            )
        usable = rl.prompts_per_step * ((self.max_age - youngest) // updates + 1)
        check(
            self.groups <= usable,
            f"{key}.groups = {self.groups}: only the groups of {usable // rl.prompts_per_step}"
            f" steps, {usable}, are young enough for max_age = {self.max_age} ({of_step}); lower"
            f" groups to {usable}, or raise max_age",
        )
        check(
            not self.max_route_age or rl.replay == "R3",
            f"{key}.max_route_age = {self.max_route_age}: with rl.replay = {rl.replay!r} the"
            " rollout records no routes; set it to 0, or rl.replay to R3",
        )
        check(
            self.max_route_age <= self.max_age,
            f"{key}.max_route_age = {self.max_route_age} exceeds max_age = {self.max_age}: no group"
            " becomes as old; lower it",
        )


def age_of(group: Group, version: int) -> int:
    """Returns the number of the policy's updates, up to `version`, since the oldest weights that
    sampled a token of the group.
    """
    return version - min(
        int(x.versions[len(x.prompt.tokens) :][x.generated].min()) for x in group.rollouts
    )


def chosen_groups(step: StepRecord, max_age: int) -> dict[int, tuple[int, int]]:
    """Returns the places of sampled groups that do not vary, in their order, with the keys of the
    held groups that take them.

    Held groups are drawn one after the other without replacement, each with a probability
    proportional to

        variance of its known rewards * (max_age + 1 - age)
    """
    held = list(step.held_groups.values())
    ages = [age_of(group, step.version) for group in held]
    young = [i for i, age in enumerate(ages) if age <= max_age]
    weights = np.array(
        [np.var(known_rewards(held[i].scores)) * (max_age + 1 - ages[i]) for i in young]
    )
    # Held groups vary and these are young enough, so every weight is positive. The first arrivals
    # of independent Poisson processes with these rates are such a draw (Efraimidis and Spirakis
    # 2006).
    rng = np.random.default_rng((step.seed, DRAW, step.number - 1))
    order = np.argsort(rng.exponential(size=len(young)) / weights, kind="stable")
    places = [place for place, group in enumerate(step.groups) if not varies(group)]
    return {place: held[young[int(n)]].prompt.key for place, n in zip(places, order)}
