"""The inputs of a predictor, and the predictions that it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import Prompt


def no_policy(prompts: Sequence[Prompt]) -> Float[np.ndarray, "n h"]:
    """Raises ValueError: a prediction without a run has no policy."""
    raise ValueError("rl.predictor: there is no policy here to compute the prompts' states with")


class PredictorInputs(NamedTuple):
    """What a prediction can be made from."""

    prompts: Sequence[Prompt]  # those of training
    seed: int
    # the policy's last hidden state of each prompt, float32, the same numbers in every process
    states: Callable[[Sequence[Prompt]], Float[np.ndarray, "n h"]] = no_policy
    version: Callable[[], int] = lambda: 0  # the policy's version


class Seen(NamedTuple):
    """The outcomes of the prompts sampled so far. `right` and `judged` are discounted counts."""

    prompts: Sequence[Prompt]
    right: Float[np.ndarray, " n"]
    judged: Float[np.ndarray, " n"]


class Prediction:
    """Predictions of a run, which follow its outcomes. By default Beta(1, 1) for every prompt."""

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """Computes what the predictions of these prompts need with the policy; every process calls
        it at the same place, with the same prompts.
        """

    def fit(self, seen: Seen) -> None:
        """Learns from all outcomes so far."""

    def priors(self, prompts: Sequence[Prompt]) -> Float[np.ndarray, "n 2"]:
        """Returns alpha and beta of the Beta distribution of each prompt's pass rate, as predicted
        from the outcomes of others.
        """
        return np.ones((len(prompts), 2))

    def compare(self, step: Seen) -> None:
        """Compares the predictions with the outcomes of a step's groups, before `fit` has seen
        them.
        """

    def rates(self) -> dict[str, float]:
        """Returns pass rates to log by name."""
        return {}

    def state(self) -> JsonObject:
        """Returns what a resumed run cannot compute again from the outcomes: JSON and arrays."""
        return {}

    def restore(self, state: JsonObject) -> None:
        """Restores `state`; `fit` follows."""
