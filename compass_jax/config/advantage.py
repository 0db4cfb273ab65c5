"""The base class of advantages of whole responses.

The advantages themselves compute, so they are in rl/advantages/, one file each, or in a user's
file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from compass_jax.base.aliases import Inputs, Tree
from compass_jax.config.seam import Seam


@dataclass(frozen=True)
class Advantage(Seam):
    """An advantage. Subclasses are frozen dataclasses whose fields are its settings.

    `rl.advantage` in the configuration holds an instance. The inputs are those of
    rl/advantages/inputs.py.
    """

    key: ClassVar[str] = "rl.advantage"
    classes: ClassVar[dict[str, str]] = {
        "grpo": "compass_jax.rl.advantages.grpo:GrpoAdvantage",
        "rloo": "compass_jax.rl.advantages.rloo:Rloo",
        "reinforce_pp": "compass_jax.rl.advantages.reinforce_pp:ReinforcePlusPlus",
        "maxrl": "compass_jax.rl.advantages.maxrl:MaxRL",
        "predicted": "compass_jax.rl.advantages.predicted:Predicted",
        "shrunk": "compass_jax.rl.advantages.shrunk:Shrunk",
    }
    required: ClassVar[tuple[str, ...]] = ("responses",)
    needs_rewards_from_zero: ClassVar[bool] = False  # refuses settings with rewards below 0
    reads_prediction: ClassVar[bool] = False
    """Whether it reads the columns of the predicted pass rates: PREDICTED, CONCENTRATION and FIRST
    (base/records.py). It needs rl.zero_variance.posterior.
    """

    @property
    def uniform_teaches(self) -> bool:
        """Whether its values are used in groups of equal rewards, and for a group's only known
        reward, too. By default their advantage is 0.
        """
        return False

    def responses(self, inputs: Inputs) -> Tree:
        """Returns the advantage `[b]` of each response (`AdvantageInputs` -> array).

        Only values of responses with a known reward are used and, unless `uniform_teaches`, only
        those in groups whose raw rewards differ: rl/prepare.py handles uniform groups.
        """
        raise NotImplementedError(f"{type(self).__name__} has no responses(inputs)")
