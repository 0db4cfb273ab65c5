"""SIGTERM at a chosen moment of a run, once: what runs behind it in the same test is left alone."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from compass_jax.rewards.score import Scorer
from compass_jax.runs.telemetry import Telemetry


def stop_at_sample(patch: pytest.MonkeyPatch, number: int) -> None:
    """When so many samples have gone to the verifiers."""
    real, submitted = Scorer.submit, []

    def submit(self, *args):
        real(self, *args)
        submitted.append(args)
        if len(submitted) == number:
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(Scorer, "submit", submit)


def stop_after_step(patch: pytest.MonkeyPatch, number: int) -> None:
    """When step `number` has been logged."""
    real, done = Telemetry.log, []

    def log(self, step, metrics, *rest):
        real(self, step, metrics, *rest)
        if step == number and not done:
            done.append("stop")
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(Telemetry, "log", log)


def stop_at_call(patch: pytest.MonkeyPatch, module: Any, name: str, number: int) -> None:
    """At call `number` of a module's function, after its work."""
    real, calls = getattr(module, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        out = real(*args, **kwargs)
        calls.append(name)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return out

    patch.setattr(module, name, call)
