"""Samples in flight: the state between the engine and the update, by key.

A prompt is drawn; its samples are queued, run, finish or pause, and are scored; its group is then
kept for the step, dropped, or carried into a later step. A group that was trained on may be stored
for replay. A stop, partial rollouts, one step off, growth and dynamic sampling all leave the same
state, and a checkpoint has ONE form of it.
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
COUNTS = ("drafted", "draft_tokens")
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
    `stored` for replay, the oldest first.

    Args:
        routes: the rows of the groups in flight, and of stored groups that keep their routes.
        unrouted: maximum number of groups that are stored without their routes. Their rows come
            after those of `routes`, in a checkpoint alone. 0: stored groups keep their routes.
    """

    def __init__(self, routes: RouteBuffer, unrouted: int = 0):
        self.routes = routes
        self.stored: dict[GroupKey, Group] = {}
        self.prompts: dict[GroupKey, Prompt] = {}
        self.samples: dict[SampleKey, Sample] = {}
        self.kept: list[GroupKey] = []  # in the order in which the step trains on them
        self.dropped: dict[GroupKey, Outcome] = {}
        self.counts: dict[str, float] = {}
        self.policy_state: JsonObject = {}  # the step policy's state, kept over all steps
        self._first: dict[GroupKey, int] = {}  # a group's first row
        end = len(routes) + unrouted * routes.size
        self._unrouted = range(len(routes), end, routes.size)  # first rows

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
    def empty(self) -> bool:
        """Whether no group is in flight or stored."""
        return not self.prompts and not self.stored

    @property
    def dropped_tokens(self) -> int:
        """The number of tokens that were sampled for the step's dropped groups."""
        return sum(x.sampled_tokens for x in self.dropped.values())

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

    def step_groups(self) -> list[Group]:
        """Returns the kept groups."""
        return [self.group(key) for key in self.kept]

    def routes_of(self, groups: Sequence[Group], live: Sequence[int] = ()) -> Tree:
        """Returns the routes `[groups * size t l k]` of kept or stored groups (row n * size + c is
        sample c of group n; unset without a sample, and for the groups at the places `live`; None
        without router replay).
        """
        rows = np.full((len(groups), self.routes.size), NO_ROW, np.int32)
        for n, group in enumerate(groups):
            for rollout in () if n in live else group.rollouts:
                rows[n, rollout.sample] = rollout.row
        # The buffer's own array has routes in the rows of `live` groups, which must be unset here.
        return self.routes.read(rows.reshape(-1), copies=bool(live))

    def store(self, groups: Iterable[GroupKey]) -> None:
        """Stores kept groups for replay, after the groups that are stored already."""
        for key in groups:
            group, first = self.group(key), self._first[key]
            # Without its routes the group needs no row on the device, only one in a checkpoint.
            if self._unrouted:
                self.routes.free(first)
                used = set(self._first.values())
                self._first[key] = next(row for row in self._unrouted if row not in used)
            self.stored[key] = _moved(group, self._first[key] - first)

    def discard(self, groups: Iterable[GroupKey]) -> None:
        """Removes stored groups."""
        for key in groups:
            del self.stored[key]
            self._free(self._first.pop(key))

    def forget_verdicts(self) -> None:
        """Removes the verdicts on the step's groups, so that a resumed run judges them again."""
        for group in self.kept:
            for sample in self.samples_of(group):
                self.samples[sample.rollout.key] = sample._replace(score=None)
        self.kept, self.counts = [], {}

    def end_step(self) -> None:
        """Removes the kept and dropped groups; open groups stay for the next step, and stored ones
        until they are discarded.
        """
        for key in self.kept:
            self._forget(key)
        for key in (*self.kept, *self.dropped):
            del self.prompts[key]
        self.kept, self.dropped, self.counts = [], {}, {}

    def _forget(self, group: GroupKey) -> None:
        for index in range(self.routes.size):
            self.samples.pop(SampleKey(*group, index), None)
        # A stored group keeps its rows until it is discarded.
        if group not in self.stored:
            self._free(self._first.pop(group))

    def _free(self, first: int) -> None:
        if first < len(self.routes):
            self.routes.free(first)

    # ---- checkpoint ------------------------------------------------------------------------------

    def state(self) -> JsonObject:
        """Returns all but tokens and routes, as JSON (which keeps rewards exactly)."""
        number = {group: n for n, group in enumerate(self.prompts)}
        scores = {key: x.score for key, x in self.samples.items() if x.score is not None}
        rollouts = [x.rollout for _, x in sorted(self.samples.items())]
        for group in self.stored.values():
            keys = (rollout.key for rollout in group.rollouts)
            scores |= zip(keys, group.scores, strict=True)
            rollouts += group.rollouts
        return {
            "prompts": [[*group, self._first.get(group, -1)] for group in self.prompts],
            "stored": [[*group, self._first[group]] for group in self.stored],
            "kept": [number[group] for group in self.kept],
            "dropped": [[number[group], *outcome] for group, outcome in self.dropped.items()],
            "scores": [[*key, *dataclasses.astuple(x)] for key, x in sorted(scores.items())],
            "drafted": [[*x.key, x.drafted, x.draft_tokens] for x in rollouts if x.draft_tokens],
            "counts": dict(self.counts),
        }

    def arrays(self, length: int) -> JsonObject:
        """Returns the samples' tokens so far in rows of `length` tokens, each sample in the row of
        its routes; rows of stored groups without routes come last. The shapes depend on the
        configuration only.
        """
        rows = len(self.routes) + len(self._unrouted) * self.routes.size
        out: JsonObject = {n: np.zeros((rows, length), dtype) for n, dtype in ARRAYS.items()}
        out |= {"lengths": np.zeros(rows, np.int32), "done": np.zeros(rows, bool)}
        of_stored = (Sample(x, True) for group in self.stored.values() for x in group.rollouts)
        for sample in (*self.samples.values(), *of_stored):
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
        stored = {(prompt, visit): first for prompt, visit, first in state.get("stored", ())}
        # A dropped group has lost its rows: its first row is saved as -1.
        firsts = (first for _, _, first in state["prompts"])
        self._first = {key: first for key, first in zip(keys, firsts, strict=True) if first >= 0}
        self._first |= stored
        routed = [first for first in self._first.values() if first < len(self.routes)]
        self.routes.adopt(routed, arrays.get("routes"))
        self.kept = [keys[n] for n in state["kept"]]
        self.dropped = {keys[n]: Outcome(*outcome) for n, *outcome in state["dropped"]}
        self.counts = dict(state["counts"])
        scores = {
            SampleKey(prompt, visit, index): Score(*score)
            for prompt, visit, index, *score in state["scores"]
        }
        drafted = {SampleKey(*x[:3]): (x[3], x[4]) for x in state.get("drafted", ())}
        columns = {name: np.asarray(arrays[name]) for name in (*ARRAYS, "lengths", "done")}
        for group, first in self._first.items():
            prompt = find(*group) if group in stored else self.prompts[group]
            rollouts = _rollouts(prompt, first, self.routes.size, columns, end_ids, drafted)
            if group in stored:
                verdicts = tuple(scores.pop(rollout.key) for rollout in rollouts)
                self.stored[group] = Group(prompt, rollouts, verdicts)
                continue
            for rollout in rollouts:
                self.put(rollout, bool(columns["done"][rollout.row]))
        # Scores of stored groups were taken out above; the others are of samples in flight.
        for key, score in scores.items():
            self.judge(key, score)


def _moved(group: Group, rows: int) -> Group:
    """Returns a group whose samples are `rows` rows further."""
    moved = (dataclasses.replace(x, row=x.row + rows) for x in group.rollouts)
    return dataclasses.replace(group, rollouts=tuple(moved))


def _rollouts(
    prompt: Prompt,
    first: int,
    size: int,
    columns: Mapping[str, np.ndarray],
    end_ids: Container[int],
    drafted: Mapping[SampleKey, tuple[int, int]],
) -> tuple[Rollout, ...]:
    """Returns a prompt's samples from `arrays`, whose rows begin at `first`."""
    rollouts = []
    for row in first + np.flatnonzero(columns["lengths"][first : first + size]):
        parts: JsonObject = {name: columns[name][row, : columns["lengths"][row]] for name in ARRAYS}
        # `truncated` is not saved: a sample is truncated unless its last token is an end token.
        cut, index = int(parts["tokens"][-1]) not in end_ids, int(row) - first
        parts |= zip(COUNTS, drafted.get(prompt.sample(index), (0, 0)), strict=True)
        rollouts.append(Rollout(prompt, index, truncated=cut, row=int(row), **parts))
    return tuple(rollouts)
