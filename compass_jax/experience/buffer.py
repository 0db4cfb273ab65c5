"""Samples in flight: the state between the engine and the update, by key.

A prompt is drawn; its samples are queued, run, finish or pause, and are scored; its group is then
kept for the step, dropped, or carried into a later step. A stop, partial rollouts, one step off,
growth and dynamic sampling all leave the same state, and a checkpoint has ONE form of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from compass_jax.aliases import JsonMapping, JsonObject, Tree
from compass_jax.config.step_policy import GroupKey
from compass_jax.records import Group, Outcome, Prompt, Rollout, SampleKey, Score
from compass_jax.rollout.routes import RouteBuffer

ARRAYS = {"tokens": np.int32, "logp": np.float32, "entropy": np.float32, "versions": np.int32}
NO_ROW = np.iinfo(np.int32).max  # a row outside every route buffer


class Sample(NamedTuple):
    """A sample that has started. Samples of a prompt in flight without an entry are queued."""

    rollout: Rollout
    done: bool  # else it is paused, and continues where it stopped
    score: Score | None = None


class ExperienceBuffer:
    """The prompts in flight, in the order in which they were drawn, and their samples.

    A prompt's group is open until it is `kept` for the step that is being collected, or `dropped`
    with its outcome. `counts` are the step's counters, by metric name.
    """

    def __init__(self, routes: RouteBuffer):
        self.routes = routes
        self.prompts: dict[GroupKey, Prompt] = {}
        self.samples: dict[SampleKey, Sample] = {}
        self.kept: list[GroupKey] = []  # in the order in which the step trains on them
        self.dropped: dict[GroupKey, Outcome] = {}
        self.counts: dict[str, float] = {}
        self.policy_state: JsonObject = {}  # what a step policy remembers, over all steps
        self._first: dict[GroupKey, int] = {}  # a group's first row in `routes`

    # ---- queries ---------------------------------------------------------------------------------

    @property
    def open(self) -> list[GroupKey]:
        """The groups that are neither kept nor dropped."""
        decided = {*self.kept, *self.dropped}
        return [group for group in self.prompts if group not in decided]

    @property
    def unscored(self) -> list[SampleKey]:
        """The samples that are done and wait for a verdict."""
        return [key for key, x in self.samples.items() if x.done and x.score is None]

    @property
    def finished(self) -> int:
        """The number of samples that are done."""
        return sum(x.done for x in self.samples.values())

    @property
    def dropped_tokens(self) -> int:
        """The number of tokens in the samples of the step's dropped groups."""
        return sum(outcome.response_tokens for outcome in self.dropped.values())

    def first_row(self, group: GroupKey) -> int:
        """Returns the row of the group's routes; those of sample c are in row `first_row + c`."""
        return self._first[group]

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
        None where a sample has none.
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

    # ---- changes ---------------------------------------------------------------------------------

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Queues the samples of prompts. Raises ValueError for a prompt that is already in
        flight.
        """
        for prompt in prompts:
            if prompt.key in self.prompts:
                raise ValueError(f"prompt {prompt.id} is in flight at visit {prompt.visit} already")
            self.prompts[prompt.key] = prompt
            self._first[prompt.key] = self.routes.allocate()

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

    def step_groups(self) -> tuple[list[Group], Tree]:
        """Returns the kept groups and their routes `[groups * size t l k]` (row n * size + c is
        sample c of group n; unset without a sample; None without router replay).
        """
        groups = [self.group(key) for key in self.kept]
        rows = np.full((len(groups), self.routes.size), NO_ROW, np.int32)
        for n, group in enumerate(groups):
            for rollout in group.rollouts:
                rows[n, rollout.sample] = rollout.row
        return groups, self.routes.read(rows.reshape(-1))

    def forget_verdicts(self) -> None:
        """Removes the verdicts on the step's groups, so that a resumed run judges them again."""
        for group in self.kept:
            for sample in self.samples_of(group):
                self.samples[sample.rollout.key] = sample._replace(score=None)
        self.kept, self.counts = [], {}

    def end_step(self) -> None:
        """Removes the kept and dropped groups; open groups stay for the next step."""
        for key in self.kept:
            self._forget(key)
        for key in (*self.kept, *self.dropped):
            del self.prompts[key]
        self.kept, self.dropped, self.counts = [], {}, {}

    def _forget(self, group: GroupKey) -> None:
        for index in range(self.routes.size):
            self.samples.pop(SampleKey(*group, index), None)
        self.routes.free(self._first.pop(group))

    # ---- checkpoint ------------------------------------------------------------------------------

    def state(self) -> JsonObject:
        """Returns all but tokens and routes, as JSON (which keeps rewards exactly)."""
        number = {group: n for n, group in enumerate(self.prompts)}
        return {
            "prompts": [[*group, self._first.get(group, -1)] for group in self.prompts],
            "kept": [number[group] for group in self.kept],
            "dropped": [[number[group], *outcome] for group, outcome in self.dropped.items()],
            "scores": [
                [*key, *dataclasses.astuple(x.score)]
                for key, x in sorted(self.samples.items())
                if x.score is not None
            ],
            "counts": dict(self.counts),
        }

    def arrays(self, length: int) -> JsonObject:
        """Returns the samples' tokens so far in rows of `length` tokens, each sample in the row of
        its routes. The shapes depend on the configuration only.
        """
        rows = len(self.routes)
        out: JsonObject = {n: np.zeros((rows, length), dtype) for n, dtype in ARRAYS.items()}
        out |= {"lengths": np.zeros(rows, np.int32), "done": np.zeros(rows, bool)}
        for sample in self.samples.values():
            row, n = sample.rollout.row, len(sample.rollout.tokens)
            out["lengths"][row], out["done"][row] = n, sample.done
            for name in ARRAYS:
                out[name][row, :n] = getattr(sample.rollout, name)
        out = {name: jnp.asarray(x) for name, x in out.items()}
        routes = self.routes.saved()
        if routes is None:
            return out
        for sample in self.samples.values():
            # A preempted turn is sampled anew, so its partial routes are unset.
            if not sample.done and sample.rollout.prompt.turns:
                row, n = sample.rollout.row, len(sample.rollout.tokens)
                routes = routes.at[row, n - 1 :].set(jnp.iinfo(routes.dtype).max)
        return {**out, "routes": routes}

    def restore(
        self,
        state: JsonObject,
        arrays: JsonMapping,
        find: Callable[[int, int], Prompt],
        end_ids: Container[int],
    ) -> None:
        """Restores what `state` and `arrays` returned; `find(id, visit)` returns a prompt."""
        keys = [(int(prompt), int(visit)) for prompt, visit, _ in state["prompts"]]
        self.prompts = {key: find(*key) for key in keys}
        firsts = (first for _, _, first in state["prompts"])
        self._first = {key: first for key, first in zip(keys, firsts, strict=True) if first >= 0}
        self.routes.adopt(list(self._first.values()), arrays.get("routes"))
        self.kept = [keys[n] for n in state["kept"]]
        self.dropped = {keys[n]: Outcome(*outcome) for n, *outcome in state["dropped"]}
        self.counts = dict(state["counts"])
        columns = {name: np.asarray(arrays[name]) for name in (*ARRAYS, "lengths", "done")}
        for group, first in self._first.items():
            for row in first + np.flatnonzero(columns["lengths"][first : first + self.routes.size]):
                parts = {name: columns[name][row, : columns["lengths"][row]] for name in ARRAYS}
                cut, index = int(parts["tokens"][-1]) not in end_ids, int(row) - first
                rollout = Rollout(self.prompts[group], index, truncated=cut, row=int(row), **parts)
                self.put(rollout, bool(columns["done"][row]))
        for prompt, visit, index, *score in state["scores"]:
            self.judge(SampleKey(prompt, visit, index), Score(*score))
