"""Prediction from the policy's own hidden state of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float

from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import Prompt
from compass_jax.config import Predictor
from compass_jax.config.ranges import Count, Range
from compass_jax.data.predictors.inputs import Prediction, PredictorInputs, Seen
from compass_jax.data.predictors.regression import ByRegression

MOST = 16_384  # prompts whose features are kept, the latest ones


@dataclass(frozen=True)
class State(Predictor):
    """Predicts a prompt by Bayesian logistic regression on the policy's last hidden state at the
    prompt's last token, projected by a fixed random matrix: what the model itself makes of the
    prompt. It takes a forward pass of each candidate's prompt on the training mesh, with routes
    chosen live. Engine and samplers are not involved.
    """

    reads_policy: ClassVar[bool] = True

    features: Annotated[int, Range(16, 1024)] = 128
    """Number of projected features."""
    std: Annotated[float, Range(0, 100, above=True)] = 4.0
    """Prior standard deviation of a weight (a number), in logits."""
    refresh: Count = 64
    """Age in policy versions from which a candidate's features are computed again."""

    def start(self, inputs: PredictorInputs) -> Prediction:
        """Returns the predictions."""
        return ByState(StateFeatures(inputs, self.features, self.refresh), self.std)


class Features(NamedTuple):
    """A prompt's projected state, and the version of the policy that computed it."""

    version: int
    row: Float[np.ndarray, " d"]


class StateFeatures:
    """Projected states of prompts, with the policy version that computed them: a resumed run cannot
    compute them again, so they are saved.

    New features of a step's candidates join the fit's only with the step's outcomes. Else a run
    that is resumed within a step would fit other features than the run that was killed.
    """

    def __init__(self, inputs: PredictorInputs, count: int, refresh: int):
        self.count = count
        self._inputs, self._refresh = inputs, refresh
        self._matrix: Float[np.ndarray, "h d"] | None = None
        self._fitted: dict[int, Features] = {}  # by the prompt's id
        self._fresh: dict[int, Features] = {}

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """Computes the features of prompts without any, or with old ones."""
        now, known = self._inputs.version(), self._fitted | self._fresh
        old = {
            prompt.id: prompt
            for prompt in prompts
            if prompt.id not in known or now - known[prompt.id].version >= self._refresh
        }
        if not old:
            return
        rows = self._project(self._inputs.states([*old.values()]))
        self._fresh |= {x: Features(now, row) for x, row in zip(old, rows, strict=True)}

    def _project(self, states: Float[np.ndarray, "n h"]) -> Float[np.ndarray, "n d"]:
        if self._matrix is None:
            rng = np.random.default_rng((self._inputs.seed, 23))
            shape = states.shape[1], self.count
            self._matrix = rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
        centred = states - states.mean(1, keepdims=True)
        deviation = np.sqrt(np.mean(centred**2, axis=1, keepdims=True))
        return (centred / np.maximum(deviation, 1e-6)) @ self._matrix

    def join(self) -> None:
        """Hands the candidates' features to the next fit; the oldest beyond MOST are forgotten."""
        for prompt, features in self._fresh.items():
            self._fitted.pop(prompt, None)
            self._fitted[prompt] = features
        self._fresh = {}
        for prompt in list(self._fitted)[:-MOST]:
            del self._fitted[prompt]

    def __call__(self, prompts: Sequence[Prompt]) -> Float[np.ndarray, "n d"]:
        """Returns the features [n d], the last of them 1. States have a large part in common, so
        they are centred on their mean; the mean square length is 1.
        """
        known = self._fitted | self._fresh
        self.prepare([prompt for prompt in prompts if prompt.id not in known])
        known = self._fitted | self._fresh
        reference = np.array([x.row for x in (self._fitted or self._fresh).values()], np.float64)
        middle = reference.mean(0)
        length = np.sqrt(np.mean(np.sum((reference - middle) ** 2, axis=1))) or 1.0
        rows = np.array([known[prompt.id].row for prompt in prompts], np.float64)
        return np.concatenate([(rows - middle) / length, np.ones((len(rows), 1))], axis=1)

    def state(self) -> JsonObject:
        """Returns the features, with their prompts and policy versions."""
        return {"fitted": self._saved(self._fitted), "fresh": self._saved(self._fresh)}

    def _saved(self, known: dict[int, Features]) -> JsonObject:
        rows = np.array([x.row for x in known.values()], np.float32).reshape(-1, self.count)
        versions = [x.version for x in known.values()]
        return {"prompts": [*known], "versions": versions, "rows": rows}

    def restore(self, state: JsonObject) -> None:
        """Restores `state`."""
        self._fitted, self._fresh = (
            {
                int(prompt): Features(int(version), row)
                for prompt, version, row in zip(
                    part["prompts"], part["versions"], np.asarray(part["rows"]), strict=True
                )
            }
            for part in (state["fitted"], state["fresh"])
        )


class ByState(ByRegression):
    """Predictions from the policy's states."""

    def __init__(self, features: StateFeatures, std: float):
        super().__init__(features, np.full(features.count + 1, std**2))
        self._states = features

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """Computes the candidates' features, in every process."""
        self._states.prepare(prompts)

    def compare(self, step: Seen) -> None:
        """Updates rho, and hands the candidates' features to the next fit."""
        super().compare(step)
        self._states.join()

    def state(self) -> JsonObject:
        """Returns the sums of rho, and the features."""
        return {**super().state(), "states": self._states.state()}

    def restore(self, state: JsonObject) -> None:
        """Restores `state`."""
        super().restore(state)
        self._states.restore(state["states"])
