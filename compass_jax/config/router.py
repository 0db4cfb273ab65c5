"""The base class of routers, which choose each token's experts and weigh them.

The routers themselves compute, so they are in model/routers/, one file each, or in a user's file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from compass_jax.base.aliases import Inputs, Tree
from compass_jax.config.seam import Seam

if TYPE_CHECKING:
    from compass_jax.config.model import MoEConfig


@dataclass(frozen=True)
class Router(Seam):
    """A router. Subclasses are frozen dataclasses whose fields are its settings.

    `model.moe.router` in the configuration holds an instance. The inputs are those of
    model/routers/inputs.py. The layer takes the `top_k` largest of `choice`, or the ids that are
    replayed, and calls `gates` with either, so that weights are always live (arXiv 2510.11370).
    """

    key: ClassVar[str] = "model.moe.router"
    classes: ClassVar[dict[str, str]] = {
        "softmax": "compass_jax.model.routers.softmax:Softmax",
        "sigmoid": "compass_jax.model.routers.sigmoid:Sigmoid",
    }
    required: ClassVar[tuple[str, ...]] = ("gates", "probs")
    selection_bias: ClassVar[bool] = False  # whether the layer has a bias for the choice

    def choice(self, inputs: Inputs) -> Tree:
        """Returns the scores `[n e]` whose largest choose a token's experts (`RouterInputs` ->
        array); by default the logits.
        """
        return inputs.logits

    def gates(self, inputs: Inputs, ids: Tree) -> Tree:
        """Returns the weights `[n k]` of the experts `ids` `[n k]`. They are gathered from the
        dense scores, so that an expert outside the live top-k has a gradient.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gates(inputs, ids)")

    def probs(self, inputs: Inputs) -> Tree:
        """Returns the probability `[n e]` of each expert, for the load-balancing loss."""
        raise NotImplementedError(f"{type(self).__name__} has no probs(inputs)")

    def check(self, moe: MoEConfig) -> None:
        """Raises ConfigError for settings that do not fit the layer; by default all do."""
