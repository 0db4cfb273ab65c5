"""Prediction by the prompt's label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from compass_jax.base.records import Prompt
from compass_jax.config import Predictor
from compass_jax.data.difficulty import label_of
from compass_jax.data.predictors.inputs import Prediction, PredictorInputs, Seen

UNIFORM = 2.0  # concentration of Beta(1, 1), the prior of a label without measurements
MEASURED = 8  # least prompts from which a label's concentration is estimated
CONCENTRATION = 1.0, 32.0  # bounds of the estimate, in samples


@dataclass(frozen=True)
class Label(Predictor):
    """Predicts a prompt by its label: Beta(c m, c (1 - m)) with the label's pass rate m and the
    concentration c that the spread of its prompts' rates shows (method of moments). A file without
    labels is one label, and nothing tells its prompts apart before they are sampled.
    """

    def start(self, inputs: PredictorInputs) -> Prediction:
        """Returns the predictions."""
        return ByLabel()


class ByLabel(Prediction):
    """A prior for each label, fitted to the counts of its prompts."""

    def __init__(self) -> None:
        self._priors: dict[str, tuple[float, float]] = {}

    def fit(self, seen: Seen) -> None:
        """Fits each label's prior."""
        by_label: dict[str, list[tuple[float, float]]] = {}
        for prompt, *counts in zip(*seen, strict=True):
            by_label.setdefault(label_of(prompt), []).append((counts[0], counts[1]))
        self._priors = {label: fit_prior(np.array(x)) for label, x in by_label.items()}

    def priors(self, prompts: Sequence[Prompt]) -> Float[np.ndarray, "n 2"]:
        """Returns the priors of the prompts' labels; Beta(1, 1) for a label without outcomes."""
        pairs = [self._priors.get(label_of(prompt), (1.0, 1.0)) for prompt in prompts]
        return np.reshape(np.array(pairs, float), (-1, 2))

    def rates(self) -> dict[str, float]:
        """Returns each label's pass rate."""
        return {label: alpha / (alpha + beta) for label, (alpha, beta) in self._priors.items()}


def fit_prior(counts: Float[np.ndarray, "n 2"]) -> tuple[float, float]:
    """Returns alpha and beta of a label's prior from its prompts' counts (right, judged), by the
    moments of the Beta-binomial distribution. The prior's variance is v = m (1 - m) / (c + 1), and
    that of the rates of k samples v + (m (1 - m) - v) / k. Discounted counts are taken as k; one
    sample each shows nothing of the spread.
    """
    right, judged = counts.T
    mean = float((right.sum() + 1) / (judged.sum() + 2))  # never 0 or 1
    concentration = UNIFORM
    if len(counts) >= MEASURED and judged.max() > 1:
        widest, share = mean * (1 - mean), float(np.mean(1 / judged))
        spread = float(np.mean((right / judged - mean) ** 2)) - widest * share
        ratio = widest * (1 - share) / max(spread, 1e-9) - 1
        concentration = float(np.clip(ratio, *CONCENTRATION))
    return concentration * mean, concentration * (1 - mean)
