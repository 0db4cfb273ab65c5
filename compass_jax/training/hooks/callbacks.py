"""The user's functions that are called after each RL step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from compass_jax.base.records import Group
from compass_jax.config import ConfigError, named
from compass_jax.devices.distributed import is_main_process
from compass_jax.training.hooks.base import Hook, HookFailed, StepRecord

Callback = Callable[[int, Sequence[Group], Mapping[str, float]], object]


class Callbacks(Hook):
    """Calls the functions that `callbacks` names, in order, in process 0 only."""

    name = "callbacks"

    def __init__(self, names: Sequence[str]):
        functions = {name: named.load(name, "callbacks") for name in names}
        for name, function in functions.items():
            if not callable(function):
                raise ConfigError(f"callbacks = {name!r}: not a function; name one")
        self._functions: dict[str, Callback] = functions if is_main_process() else {}

    def on_metrics(self, step: StepRecord) -> None:
        """Calls every callback with the finished step, its groups and its metrics.

        Raises HookFailed for an error in a callback.
        """
        for name, function in self._functions.items():
            try:
                function(step.number, step.groups, dict(step.metrics))
            except Exception as error:
                raise HookFailed(
                    f"callbacks: {name} failed after step {step.number}: {type(error).__name__}:"
                    f" {error}; the run was saved: mend it or remove it, then run the same command"
                    " again"
                ) from error
