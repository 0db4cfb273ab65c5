"""The user's functions that are called after each RL step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from compass_jax.config import ConfigError, named
from compass_jax.distributed import is_main_process
from compass_jax.errors import CompassError
from compass_jax.records import Group

Callback = Callable[[int, Sequence[Group], Mapping[str, float]], object]


class CallbackFailed(CompassError, RuntimeError):
    """A callback raised an error; the message names it, and the cause has the traceback."""


class Callbacks:
    """Calls the functions that `callbacks` names, in order, in process 0 only."""

    def __init__(self, names: Sequence[str]):
        functions = {name: named.load(name, "callbacks") for name in names}
        for name, function in functions.items():
            if not callable(function):
                raise ConfigError(f"callbacks = {name!r}: not a function; name one")
        self._functions: dict[str, Callback] = functions if is_main_process() else {}

    def __call__(self, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
        """Calls every callback with the finished step, its groups and its metrics.

        Raises CallbackFailed for an error in a callback: the step is repeated by the next start.
        """
        for name, function in self._functions.items():
            try:
                function(step, groups, dict(metrics))
            except Exception as error:
                raise CallbackFailed(
                    f"callbacks: {name} failed after step {step}: {type(error).__name__}: {error};"
                    " mend it or remove it, then the same command continues from the last"
                    " checkpoint"
                ) from error
