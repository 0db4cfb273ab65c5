"""The base class of a user's step hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from compass_jax.aliases import Inputs, JsonObject
from compass_jax.config.seam import Seam


@dataclass(frozen=True)
class StepHook(Seam):
    """What a run does beside its steps. `rl.hooks` in the configuration holds instances; a subclass
    is a frozen dataclass whose fields are its settings.

    All methods are called on the main thread of every process, in the order of `rl.hooks`; only
    process 0 may write files. `step` is the step so far (training/hooks/base.py, StepRecord); its
    `end(why)` ends the run after the step, and all processes must call it in the same one. `state`
    is a JSON object that the methods may change; the checkpoint keeps it. An error ends the run
    with the hook's name, after a save.
    """

    key: ClassVar[str] = "rl.hooks"

    def before_rollout(self, number: int, state: JsonObject) -> None:
        """Runs before step `number` draws its first prompt; with rl.one_step_off, before the
        updates of the step before it begin.
        """

    def on_groups(self, step: Inputs, state: JsonObject) -> None:
        """Runs with the groups that the step sampled."""

    def on_arrays(self, step: Inputs, state: JsonObject) -> None:
        """Runs with the arrays that the step trains on, which it may change in place."""

    def after_update(self, step: Inputs, state: JsonObject) -> None:
        """Runs after the step's updates, with their metrics."""

    def on_metrics(self, step: Inputs, state: JsonObject) -> None:
        """Runs with all metrics of the finished step, and may add others."""
