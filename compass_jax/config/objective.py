"""The base class of policy objectives.

The objectives themselves compute, so they are in rl/objectives/, one file each, or in a user's
file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from compass_jax.base.aliases import Inputs, Tree
from compass_jax.config.ranges import Coefficient
from compass_jax.config.seam import Seam


@dataclass(frozen=True)
class Objective(Seam):
    """A policy objective. Subclasses are frozen dataclasses whose fields are its settings.

    `rl.objective` in the configuration holds an instance. The inputs are those of
    rl/objectives/inputs.py.
    """

    key: ClassVar[str] = "rl.objective"
    classes: ClassVar[dict[str, str]] = {
        "grpo": "compass_jax.rl.objectives.grpo:Grpo",
        "gspo": "compass_jax.rl.objectives.gspo:Gspo",
        "cispo": "compass_jax.rl.objectives.cispo:Cispo",
        "espo": "compass_jax.rl.objectives.espo:Espo",
    }
    recipes: ClassVar[dict[str, str]] = {
        "dapo": "compass_jax.rl.objectives.grpo:dapo",
        "dr_grpo": "compass_jax.rl.objectives.grpo:with_dr_grpo",
    }
    required: ClassVar[tuple[str, ...]] = ("surrogate", "weights")
    needs_advantage: ClassVar[bool] = False
    """Whether the surrogate's gradient is 0 at tokens whose advantage is 0, so that rows without
    any advantage need no backward pass.
    """
    combines_responses: ClassVar[bool] = True
    """Whether the weights or groups of a response's tokens may depend on the scores of others.
    False saves a forward pass of the first update; each run verifies it there.
    """

    kl_coef: Coefficient = 0.0
    """KL penalty (k3) from the initial policy (a factor); 0: not computed."""
    router_aux_coef: Coefficient = 0.0
    """Load-balancing loss of the experts (a factor)."""

    @property
    def divides_by_std(self) -> bool:
        """Whether the objective permits division of GRPO's advantages by the standard deviation of
        their group.
        """
        return True

    @property
    def averages_groups(self) -> bool:
        """Whether `weights` begins with the mean over a group's samples (WeightInputs.responses),
        so that a sample weighs less in a larger group.
        """
        return True

    def surrogate(self, inputs: Inputs) -> Tree:
        """Returns each token's `Surrogate`, to be maximised (`PolicyInputs` -> `Surrogate`)."""
        raise NotImplementedError(f"{type(self).__name__} has no surrogate(inputs)")

    def weights(self, inputs: Inputs) -> Tree:
        """Returns the weight `[b t]` of each token in the mean (`WeightInputs` -> array)."""
        raise NotImplementedError(f"{type(self).__name__} has no weights(inputs)")

    def groups(self, old_entropy: Tree, mask: Tree) -> Tree:
        """Returns the group `[b t]` of each token within its response, fixed once per rollout.

        None: the objective does not group tokens.
        """
        return None
