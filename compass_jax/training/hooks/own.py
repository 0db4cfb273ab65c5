"""Hooks of the user's (rl.hooks)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from compass_jax.base.aliases import JsonObject
from compass_jax.config.step_hook import StepHook
from compass_jax.training.hooks.base import Hook, StepRecord
from compass_jax.weights.state import split


class _OwnHook(Hook):
    """A user's hook with its state. The name has a number where a class occurs again."""

    def __init__(self, hook: StepHook, name: str):
        self._hook, self.name = hook, name
        self._state: dict[str, object] = {}

    def before_rollout(self, number: int) -> None:
        self._hook.before_rollout(number, self._state)

    def on_groups(self, step: StepRecord) -> None:
        self._hook.on_groups(step, self._state)

    def on_arrays(self, step: StepRecord) -> None:
        self._hook.on_arrays(step, self._state)

    def after_update(self, step: StepRecord) -> None:
        self._hook.after_update(step, self._state)
        self._check()

    def on_metrics(self, step: StepRecord) -> None:
        self._hook.on_metrics(step, self._state)
        self._check()

    def _check(self) -> None:
        """Raises TypeError for a state that no checkpoint can keep."""
        json.dumps(split(self._state)[0], allow_nan=False)

    def state(self) -> JsonObject:
        return self._state

    def restore(self, state: JsonObject, number: int) -> None:
        self._state = {key: _on_host(value) for key, value in state.items()}


def _on_host(value: object) -> object:
    """Returns a part of a state with numpy arrays that can be written to, as the hook left them."""
    if isinstance(value, dict):
        return {key: _on_host(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_on_host(x) for x in value]
    return np.array(value) if isinstance(value, jax.Array) else value


def own_hooks(hooks: Sequence[StepHook]) -> Iterator[_OwnHook]:
    """Yields the hooks of rl.hooks, in order."""
    seen: Counter[str] = Counter()
    for hook in hooks:
        name = hook.name.rpartition("/")[2]  # of a file, which may move
        seen[name] += 1
        yield _OwnHook(hook, f"{name} {seen[name]}" if seen[name] > 1 else name)
