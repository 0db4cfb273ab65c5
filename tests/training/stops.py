"""Ways to end a run at a chosen moment, once: later runs of the same test are not affected."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from compass_jax.rewards.score import Scorer
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training.learner import Learner


class Killed(BaseException):
    """An exception that ends a run at once, like a kill, without saving its state."""


def terminate() -> None:
    """Sends SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)


def kill() -> None:
    """Raises Killed."""
    raise Killed


def at_call(
    patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, act: Callable[[], None]
) -> list[tuple]:
    """Acts after call `number` of a function or method; returns the arguments of the calls."""
    real, calls = getattr(owner, name), []

    def call(*args: Any, **options: Any) -> Any:
        out = real(*args, **options)
        calls.append(args)
        if len(calls) == number:
            act()
        return out

    patch.setattr(owner, name, call)
    return calls


def stop_at_call(patch: pytest.MonkeyPatch, module: Any, name: str, number: int) -> None:
    """Stops after call `number` of a module's function."""
    at_call(patch, module, name, number, terminate)


def stop_at_sample(patch: pytest.MonkeyPatch, number: int) -> None:
    """Stops when `number` samples have gone to the verifiers."""
    at_call(patch, Scorer, "submit", number, terminate)


def at_step(patch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Acts when step `number` has been logged, before it is saved."""
    real, done = Telemetry.log, []

    def log(self, step, metrics, *rest):
        real(self, step, metrics, *rest)
        if step == number and not done:
            done.append(step)
            act()

    patch.setattr(Telemetry, "log", log)


def stop_after_step(patch: pytest.MonkeyPatch, number: int) -> None:
    """Stops when step `number` has been logged."""
    at_step(patch, number, terminate)


def kill_after_step(patch: pytest.MonkeyPatch, number: int) -> None:
    """Kills when step `number` has been logged, before it is saved."""
    at_step(patch, number, kill)


def kill_in_training(patch: pytest.MonkeyPatch, number: int) -> None:
    """Kills when the training of step `number` begins."""
    real, done = Learner.train, []

    def train(self, *args, **options):
        if int(self.state.step) == number - 1 and not done:
            done.append(number)
            kill()
        return real(self, *args, **options)

    patch.setattr(Learner, "train", train)
