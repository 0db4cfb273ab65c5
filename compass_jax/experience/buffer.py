"""Samples in flight: the state between the engine and the update, by key.

A prompt is drawn; its samples are queued, run, finish or pause, and are scored; its group is then
kept for the step, dropped, or carried into a later step. A hook may hold a group past its step. A
stop, partial rollouts, one step off, growth and dynamic sampling all leave the same state, and a
checkpoint has ONE form of it (experience/saved_samples.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.base.records import Group, Outcome, Prompt, Rollout, SampleKey, Score
from compass_jax.config.step_policy import GroupKey
from compass_jax.rollout.routes import RouteBuffer

NO_ROW = np.iinfo(np.int32).max  # a row outside every route buffer


class Sample(NamedTuple):
    """A sample that has started. Samples of a prompt in flight without an entry are queued."""

    rollout: Rollout
    done: bool  # else it is paused, and continues where it stopped
    score: Score | None = None


class ExperienceBuffer:
    """The prompts in flight, in the order in which they were drawn, and their samples.

    A prompt's group is open until it is `kept` for the step that is being collected, or `dropped`
    with its outcome. `counts` are the step's counters, by metric name. Groups of earlier steps are
    `held` for hooks, the oldest first.

    Args:
        routes: the rows of the groups in flight and, if it `holds_routes`, of held groups.
        holds_routes: whether held groups keep their routes.
    """

    def __init__(self, routes: RouteBuffer, holds_routes: bool = False):
        self.routes, self.holds_routes = routes, holds_routes
        self.held: dict[GroupKey, Group] = {}
        self.prompts: dict[GroupKey, Prompt] = {}
        self.samples: dict[SampleKey, Sample] = {}
        self.kept: list[GroupKey] = []  # in the order in which the step trains on them
        self.dropped: dict[GroupKey, Outcome] = {}
        self.counts: dict[str, float] = {}
        self.policy_state: JsonObject = {}  # the step policy's state, kept over all steps
        self.first: dict[GroupKey, int] = {}  # the row of the routes of a group's first sample

    # ---- queries ---------------------------------------------------------------------------------

    @property
    def open(self) -> list[GroupKey]:
        """The groups that are neither kept nor dropped."""
        decided = {*self.kept, *self.dropped}
        return [group for group in self.prompts if group not in decided]

    @property
    def unjudged(self) -> list[SampleKey]:
        """The samples that are done and wait for a verdict."""
        return [key for key, x in self.samples.items() if x.done and x.score is None]

    @property
    def finished(self) -> int:
        """The number of samples that are done."""
        return sum(x.done for x in self.samples.values())

    @property
    def empty(self) -> bool:
        """Whether no group is in flight or held."""
        return not self.prompts and not self.held

    @property
    def dropped_tokens(self) -> int:
        """The number of tokens that were sampled for the step's dropped groups."""
        return sum(x.sampled_tokens for x in self.dropped.values())

    def samples_of(self, group: GroupKey) -> list[Sample]:
        """Returns the group's samples that are done or paused, in order."""
        keys = (SampleKey(*group, index) for index in range(self.routes.size))
        return [self.samples[key] for key in keys if key in self.samples]

    def done(self, group: GroupKey, size: int) -> bool:
        """Returns whether the group's first `size` samples are done."""
        samples = (self.samples.get(SampleKey(*group, index)) for index in range(size))
        return all(x is not None and x.done for x in samples)

    def scores(self, group: GroupKey) -> list[Score | None]:
        """Returns the verdicts on the group's samples, from the first to the last that is done;
        None for a sample without a verdict.
        """
        samples = {x.rollout.sample: x for x in self.samples_of(group) if x.done}
        return [
            samples[i].score if i in samples else None for i in range(max(samples, default=-1) + 1)
        ]

    def group(self, group: GroupKey) -> Group:
        """Returns a group whose samples are all done and scored. Raises ValueError otherwise."""
        samples = self.samples_of(group)
        scores = tuple(x.score for x in samples if x.score is not None)
        if len(scores) < len(samples):
            raise ValueError(f"group {group} has samples that are not scored")
        return Group(self.prompts[group], tuple(x.rollout for x in samples), scores)

    def step_groups(self) -> list[Group]:
        """Returns the kept groups."""
        return [self.group(key) for key in self.kept]

    def routes_of(self, groups: Sequence[Group], live: Collection[int] = ()) -> Tree:
        """Returns the routes `[groups * size t l k]` of kept or held groups (row n * size + c is
        sample c of group n; unset without a sample or without routes, and for the groups at the
        places `live`; None without router replay).
        """
        rows = np.full((len(groups), self.routes.size), NO_ROW, np.int32)
        for n, group in enumerate(groups):
            for rollout in () if n in live else group.rollouts:
                rows[n, rollout.sample] = rollout.row
        # The buffer's own array has other groups' routes at the places that must be unset.
        without = any(x.row == NO_ROW for group in groups for x in group.rollouts)
        return self.routes.read(rows.reshape(-1), copies=bool(live) or without)

    # ---- changes ---------------------------------------------------------------------------------

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Queues the samples of prompts. Raises ValueError for a prompt that is already in
        flight.
        """
        for prompt in prompts:
            if prompt.key in self.prompts:
                raise ValueError(f"prompt {prompt.id} is in flight at visit {prompt.visit} already")
            self.prompts[prompt.key] = prompt
            self.first[prompt.key] = self.routes.allocate()

    def put(self, rollout: Rollout, done: bool) -> None:
        """Stores the tokens that a sample has so far; its routes are in its row."""
        self.samples[rollout.key] = Sample(rollout, done)

    def judge(self, key: SampleKey, score: Score) -> None:
        """Stores a verdict. It is final: a verdict that depends on a clock could change."""
        self.samples[key] = self.samples[key]._replace(score=score)

    def count(self, counts: Mapping[str, float]) -> None:
        """Adds to the step's counters."""
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + float(value)

    def keep(self, groups: Sequence[GroupKey]) -> None:
        """Appends groups to those that the step trains on."""
        self.kept += groups

    def drop(self, group: GroupKey, outcome: Outcome) -> None:
        """Removes a group that is not trained on, and stores its outcome."""
        self.dropped[group] = outcome
        self._forget(group)

    def forget_verdicts(self) -> None:
        """Removes the verdicts on the step's groups, so that a resumed run judges them again."""
        for group in self.kept:
            for sample in self.samples_of(group):
                self.samples[sample.rollout.key] = sample._replace(score=None)
        self.kept, self.counts = [], {}

    def end_step(self, hold: Collection[GroupKey] = ()) -> None:
        """Removes the kept and dropped groups, and the held ones, but for those in `hold`; open
        groups stay for the next step.
        """
        for key in [key for key in self.held if key not in hold]:
            del self.held[key]
            self._free(key)
        for key in self.kept:
            if key in hold:
                self.held[key] = (
                    self.group(key) if self.holds_routes else without_rows(self.group(key))
                )
            self._forget(key)
        for key in (*self.kept, *self.dropped):
            del self.prompts[key]
        self.kept, self.dropped, self.counts = [], {}, {}

    def _forget(self, group: GroupKey) -> None:
        for index in range(self.routes.size):
            self.samples.pop(SampleKey(*group, index), None)
        if group not in self.held or not self.holds_routes:
            self._free(group)

    def _free(self, group: GroupKey) -> None:
        if group in self.first:
            self.routes.free(self.first.pop(group))


def without_rows(group: Group) -> Group:
    """Returns a group without its rows of routes."""
    rollouts = tuple(dataclasses.replace(x, row=NO_ROW) for x in group.rollouts)
    return dataclasses.replace(group, rollouts=rollouts)
