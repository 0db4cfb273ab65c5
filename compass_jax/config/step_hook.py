"""The base class of a user's step hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from compass_jax.base.aliases import Inputs, JsonObject
from compass_jax.config.seam import Seam

if TYPE_CHECKING:
    from compass_jax.config.training import RLConfig


@dataclass(frozen=True)
class StepHook(Seam):
    """What a run does beside its steps. `rl.hooks` in the configuration holds instances; a subclass
    is a frozen dataclass whose fields are its settings.

    All methods are called on the main thread of every process, in the order of `rl.hooks`; only
    process 0 may write files. `step` is the step so far (training/hooks/base.py, StepRecord); its
    `end(why)` ends the run after the step, and all processes must call it in the same one. `state`
    is a JSON object, which may have numpy arrays in it; the methods may change it, and the
    checkpoint keeps it. An error ends the run with the hook's name, after a save.
    """

    key: ClassVar[str] = "rl.hooks"

    @property
    def held_groups(self) -> int:
        """The largest number of groups that the hook holds past their step (`step.hold`), for which
        memory is reserved.
        """
        return 0

    @property
    def holds_routes(self) -> bool:
        """Whether held groups keep their routes, on the devices that sample."""
        return False

    def check(self, rl: RLConfig) -> None:
        """Raises ConfigError for settings of the run (`RLConfig`) with which the hook cannot
        act.
        """

    def before_rollout(self, number: int, state: JsonObject) -> None:
        """Runs before step `number` draws its first prompt; with rl.one_step_off, before the
        updates of the step before it begin.
        """

    def on_groups(self, step: Inputs, state: JsonObject) -> None:
        """Runs with the groups that the step sampled. It may train on held ones in their places
        (`step.put`), and hold groups past the step (`step.hold`).
        """

    def on_arrays(self, step: Inputs, state: JsonObject) -> None:
        """Runs with the arrays that the step trains on, which it may change in place."""

    def after_update(self, step: Inputs, state: JsonObject) -> None:
        """Runs after the step's updates, with their metrics."""

    def on_metrics(self, step: Inputs, state: JsonObject) -> None:
        """Runs with all metrics of the finished step, and may add others."""
