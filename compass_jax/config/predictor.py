"""The base class of predictors, which predict the pass rate of a prompt that was never sampled.

The predictors themselves are in data/predictors/, one file each, or in a user's file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from compass_jax.base.aliases import Inputs, Tree
from compass_jax.config.seam import Seam, seam_class


@dataclass(frozen=True)
class Predictor(Seam):
    """A predictor. Subclasses are frozen dataclasses whose fields are its settings.

    `rl.predictor` in the configuration holds an instance; `rl.zero_variance.posterior` selects
    prompts by it. A prompt's own counts always join its prediction: together they are the posterior
    that selection draws from, that screening decides by, and that advantages take for a baseline.
    """

    key: ClassVar[str] = "rl.predictor"
    classes: ClassVar[dict[str, str]] = {
        "label": "compass_jax.data.predictors.label:Label",
        "text": "compass_jax.data.predictors.text:Text",
        "state": "compass_jax.data.predictors.state:State",
    }
    required: ClassVar[tuple[str, ...]] = ("start",)
    reads_policy: ClassVar[bool] = False  # whether it computes with the policy's parameters

    def start(self, inputs: Inputs) -> Tree:
        """Returns the run's predictions (`PredictorInputs` -> `Prediction`, both of
        data/predictors/inputs.py).
        """
        raise NotImplementedError(f"{type(self).__name__} has no start(inputs)")


def default_predictor() -> Predictor:
    """Returns the prediction by the prompt's text."""
    return seam_class(Predictor, "text")()
