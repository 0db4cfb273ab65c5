"""SIGTERM at a chosen moment of a run, once: what runs behind it in the same test is left alone."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from compass_jax.rewards.score import Scorer
from compass_jax.telemetry import Telemetry
from compass_jax.train import loop


def stop_at_sample(patch: pytest.MonkeyPatch, number: int, verifier: str) -> None:
    """When so many samples have gone to the verifiers; `verifier`: a check of odd_verifiers."""

    class Interrupting(Scorer):
        submitted = 0

        def submit(self, *args):
            super().submit(*args)
            Interrupting.submitted += 1
            if Interrupting.submitted == number:
                os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(loop, "Scorer", partial(Interrupting, verifier=f"odd_verifiers:{verifier}"))


def stop_after_step(patch: pytest.MonkeyPatch, number: int) -> None:
    """When step `number` has been logged."""
    real, done = Telemetry.log, []

    def log(self, step, metrics):
        real(self, step, metrics)
        if step == number and not done:
            done.append("stop")
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(Telemetry, "log", log)
