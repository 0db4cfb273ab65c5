"""Hooks: what a run does beside its steps, each in a file of its own.

All are called in the order in which training/building.py lists them, on the main thread of every
process; only process 0 writes files. With `rl.one_step_off` the rollout of step n + 1 begins before
the updates of step n, so that `before_rollout(n + 1)` comes before `on_metrics` of n, and a
checkpoint's state is read after that rollout has ended.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from compass_jax.base.aliases import JsonMapping, JsonObject
from compass_jax.base.errors import CompassError
from compass_jax.base.records import Group, StepArrays
from compass_jax.config.step_policy import GroupKey
from compass_jax.experience.metrics import Bins
from compass_jax.training.trace import TokenTrace

Rewards = Mapping[str, float]  # mean reward of each prompt, by its id


BEGUN = "begun_rollout"  # among the states of a checkpoint


class HookFailed(CompassError, RuntimeError):
    """A hook raised an error; the message names it, and the cause has the traceback."""


@dataclass
class StepRecord:
    """One step, filled in as it proceeds: a hook finds in it what came before its call."""

    number: int  # from 1
    groups: list[Group]  # that the step sampled
    version: int = 0  # the policy's, before the updates
    seed: int = 0  # of the run
    held_groups: Mapping[GroupKey, Group] = field(default_factory=dict)  # the oldest first
    room: int = 0  # the number of groups that may be held
    trained: list[Group] = field(default_factory=list)  # `groups`, with held ones in their places
    earlier: dict[int, bool] = field(default_factory=dict)  # places of held ones: routed live?
    to_hold: set[GroupKey] = field(default_factory=set)  # groups that are held from here on
    arrays: StepArrays | None = None
    trace: TokenTrace | None = None  # of the tokens that are logged
    advantage: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [b], of each response
    entropy: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [b], nats; NaN: not scored
    rate: float = 1.0  # factor of the learning rate of the step's updates
    metrics: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Bins] = field(default_factory=dict)
    failure: HookFailed | None = None  # of a hook after the update: the run ends, with the step
    end: Callable[[str], None] = lambda why: None  # ends the run after the step; why, as "by ..."

    def __post_init__(self) -> None:
        self.trained = self.trained or list(self.groups)

    def put(self, place: int, key: GroupKey, *, live: bool = True) -> None:
        """Trains on a held group in the place of a sampled one, whose tokens then have no signal;
        by its recorded routes unless `live`. For `on_groups`. Raises ValueError for an unknown
        place or key.
        """
        if not 0 <= place < len(self.groups):
            raise ValueError(f"place {place}: the step has {len(self.groups)} groups, from 0 on")
        if key not in self.held_groups:
            raise ValueError(f"no held group has the key {key}")
        self.trained[place], self.earlier[place] = self.held_groups[key], live

    def scale_rate(self, factor: float) -> None:
        """Multiplies the learning rate of this step's updates, without another compilation. For
        `on_groups` and `on_arrays`. Raises ValueError unless `factor` is finite and at least 0.
        """
        if not 0 <= factor < math.inf:
            raise ValueError(f"a factor of the learning rate is {factor}; it must be 0 or more")
        self.rate *= factor

    def hold(self, keys: Iterable[GroupKey]) -> None:
        """Keeps groups of this step, or held ones, until the next step; all others that were held
        are forgotten. A stage of `rl.stages` ends with none. Raises ValueError where there is no
        such group, or no room: a hook announces `held_groups`.
        """
        self.to_hold |= set(keys)
        known = {*self.held_groups, *(group.prompt.key for group in self.groups)}
        if missing := self.to_hold - known:
            raise ValueError(f"no group of this step or held one has the key {min(missing)}")
        if len(self.to_hold) > self.room:
            raise ValueError(
                f"{len(self.to_hold)} groups to hold, and the hooks' held_groups are {self.room}"
            )

    @property
    def replaced(self) -> list[Group]:
        """The sampled groups that held ones have the places of."""
        return [self.groups[place] for place in sorted(self.earlier)]

    @property
    def filled(self) -> StepArrays:
        """`arrays`, in a step that has them."""
        assert self.arrays is not None
        return self.arrays


class Hook:
    """The base of hooks: each method does nothing. `name` is unique in a run."""

    name: str = ""

    def before_rollout(self, number: int) -> None:
        """Runs before step `number` draws its first prompt."""

    def on_groups(self, step: StepRecord) -> None:
        """Runs with the groups that the step sampled."""

    def on_arrays(self, step: StepRecord) -> None:
        """Runs with the arrays that the step trains on, which it may change in place."""

    def after_update(self, step: StepRecord) -> None:
        """Runs after the step's updates, with their metrics, before the weights' sync."""

    def on_metrics(self, step: StepRecord) -> None:
        """Runs with all metrics of a finished step, and may add others."""

    def on_evaluation(self, number: int, rewards: Rewards) -> None:
        """Runs with the mean reward of each held-out prompt, by its id, after step `number`
        (0: before the first), if all prompts of the sets or those between steps were evaluated.
        """

    def state(self) -> JsonObject:
        """Returns the state for a checkpoint."""
        return {}

    def restore(self, state: JsonObject, number: int) -> None:
        """Returns to the state of the checkpoint after step `number`."""


H = TypeVar("H", bound=Hook)


class Hooks:
    """A run's hooks, called in order.

    In a step the loop calls `begin_rollout`, `begin_step` (on_groups), `call` (on_arrays), `finish`
    (after_update) and `end_step` (on_metrics). Before the update an error ends the run at once;
    after it the step is logged and saved first. `begin_step` and `end_step` also set the states
    that a checkpoint in between has.

    A step that is interrupted or fails before its update is repeated, so that its checkpoint has
    the states from before the step's groups were seen; a rollout is begun once.
    """

    def __init__(self, hooks: Sequence[Hook]):
        self._hooks = hooks
        self._begun = 0  # the step of the latest `before_rollout`
        self._before: JsonObject | None = None  # states before an unfinished step
        names = [hook.name for hook in hooks]
        if len(set(names)) < len(names):
            raise ValueError(f"hooks: two have one name: {', '.join(names)}")

    def find(self, kind: type[H]) -> H:
        """Returns the hook of a class."""
        return next(hook for hook in self._hooks if isinstance(hook, kind))

    def call(self, method: Callable[..., None], *arguments: StepRecord | int | Rewards) -> None:
        """Calls a method of the class Hook on each hook. Raises HookFailed for the first error."""
        for hook in self._hooks:
            try:
                getattr(hook, method.__name__)(*arguments)
            except CompassError:
                raise
            except Exception as error:
                raise HookFailed(
                    f"{hook.name}: {method.__name__} failed: {type(error).__name__}: {error}; the"
                    " run was saved: mend it or remove it, then run the same command again"
                ) from error

    def begin_rollout(self, number: int) -> None:
        """Calls `before_rollout`, unless it was called for this step before a restart."""
        if number <= self._begun:
            return
        outer, self._before = self._before, self.state()
        self.call(Hook.before_rollout, number)
        self._begun, self._before = number, outer

    def begin_step(self, step: StepRecord) -> None:
        """Calls `on_groups`; until `end_step` the states of a checkpoint are those of now."""
        self._before = self.state()
        self.call(Hook.on_groups, step)

    def end_step(self, step: StepRecord) -> None:
        """Calls `on_metrics` of a step whose update is done."""
        self._before = None
        self.finish(Hook.on_metrics, step)

    def finish(self, method: Callable[..., None], step: StepRecord) -> None:
        """Calls a method of each hook after the update. The first error becomes the step's
        `failure`: the weights have changed, so that the step is logged and saved before the run
        ends.
        """
        for hook in self._hooks:
            try:
                Hooks([hook]).call(method, step)
            except HookFailed as error:
                step.failure = step.failure or error

    def state(self) -> JsonObject:
        """Returns the states of the hooks that have one, by name, and the latest rollout."""
        if self._before is not None:
            return self._before
        states = {hook.name: state for hook in self._hooks if (state := hook.state())}
        rollout = {BEGUN: self._begun} if self._begun else {}
        return copy.deepcopy(states) | rollout

    def restore(self, states: JsonMapping, number: int, tell: Callable[[str], None]) -> None:
        """Restores each hook's state by its name; `tell` gets a line for a state of no hook, and
        for a hook without one that begins anew.
        """
        self._begun = states.get(BEGUN, 0)
        for hook in self._hooks:
            if hook.name in states:
                hook.restore(states[hook.name], number)
            elif hook.state():
                tell(f"the checkpoint has no state of the hook {hook.name!r}, which begins anew")
        for name in sorted(set(states) - {hook.name for hook in self._hooks} - {BEGUN}):
            tell(f"the checkpoint has a state of the hook {name!r}, which this run does not have")
