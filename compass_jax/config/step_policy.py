"""The base class of step policies, which decide which prompts a step samples and which groups
it trains on.

The policies themselves are in experience/step_policies/, one file each, or in a user's file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from compass_jax.base.aliases import Inputs, JsonMapping
from compass_jax.config.errors import check
from compass_jax.config.seam import Seam, seam_class

if TYPE_CHECKING:
    from compass_jax.config.sampling import SamplingConfig

GroupKey = tuple[int, int]  # Prompt.key


@dataclass(frozen=True)
class StepPolicy(Seam):
    """A step policy. Subclasses are frozen dataclasses whose fields are its settings.

    `rl.step_policy` in the configuration holds an instance, or None for one of this package's,
    which `SamplingConfig.policy` then takes by the other settings. The inputs are those of
    experience/step_policies/inputs.py.

    Its methods are pure functions of the inputs: they read no clock and draw no random numbers, so
    that a stop changes no decision and all processes take the same ones. A policy that has to
    remember something returns a state, which the buffer and the checkpoint hold.
    """

    key: ClassVar[str] = "rl.step_policy"
    classes: ClassVar[dict[str, str]] = {
        "plain": "compass_jax.experience.step_policies.plain:Plain",
        "dynamic": "compass_jax.experience.step_policies.dynamic:DynamicSampling",
        "partial": "compass_jax.experience.step_policies.partial:PartialRollouts",
        "screening": "compass_jax.experience.step_policies.screening:Screening",
    }
    required: ClassVar[tuple[str, ...]] = ("missing", "chosen")
    carries: ClassVar[bool] = False
    """True: the rollout ends as soon as enough groups are complete, and open groups continue in the
    next step. False: it ends when no sample is missing, and groups that are not chosen are dropped.
    """

    def missing(self, inputs: Inputs) -> int:
        """Returns how many prompts to draw now (`StepInputs` -> int)."""
        raise NotImplementedError(f"{type(self).__name__} has no missing(inputs)")

    def chosen(self, inputs: Inputs) -> Sequence[GroupKey]:
        """Returns the open groups to train on, at most `inputs.needed` (`StepInputs` -> keys).

        It is called when no sample is missing, and again until the step has its groups. Only
        complete groups can be chosen.
        """
        raise NotImplementedError(f"{type(self).__name__} has no chosen(inputs)")

    def dropped(self, inputs: Inputs, chosen: Sequence[GroupKey]) -> Sequence[GroupKey]:
        """Returns the complete open groups to drop. By default a policy that carries groups drops
        none, any other all that it does not choose.
        """
        return [] if self.carries else [key for key in inputs.open if key not in chosen]

    def grow(self, inputs: Inputs, group: GroupKey) -> int:
        """Returns how many samples a group should have by the scores that it has so far, at most
        `inputs.sampling.capacity`. By default rl.group_size, doubled up to
        rl.zero_variance.grow_to while the group is uniform.
        """
        return inputs.doubled_size(group)

    def round_of(self, sampling: SamplingConfig, index: int) -> int:
        """Returns the round in which sample `index` of a group runs: the samples of a round run
        together, once those of earlier rounds are scored. A policy that carries groups has no
        rounds. By default the number of times that the group has been doubled for the sample.
        """
        return sampling.doublings(index)

    def first_samples(self, sampling: SamplingConfig) -> int:
        """Returns how many samples of a group are run whatever their rewards are; whether a later
        one is run may depend on the rewards of earlier ones. By default rl.group_size. Advantages
        that compare with a prediction take their baselines from these samples alone.
        """
        return sampling.group_size

    def counts(self, inputs: Inputs, chosen: Sequence[GroupKey]) -> Mapping[str, float]:
        """Returns metrics of this choice by name, which are summed over a step's choices. By
        default none.
        """
        return {}

    def next_state(self, inputs: Inputs, chosen: Sequence[GroupKey]) -> JsonMapping:
        """Returns the policy's state after this choice, a JSON object; `inputs.state` is the one
        before it, at first {}. By default it does not change.
        """
        return inputs.state

    def groups_in_flight(self, sampling: SamplingConfig) -> int:
        """Returns the largest number of groups in flight at once, those that are chosen for the
        step included. By default rl.prompts_per_step. Memory for their routes is reserved.
        """
        return sampling.prompts_per_step

    def prompts_per_round(self, sampling: SamplingConfig) -> int:
        """Returns how many prompts are rolled out together. By default all that can be in
        flight.
        """
        return self.groups_in_flight(sampling)

    def most_rounds(self, sampling: SamplingConfig) -> int:
        """Returns the largest number of rounds of prompts that a step draws. By default 1; the
        rounds of a policy with more, and the groups that it drops, are counted like those of
        dynamic sampling (zero_variance/dynamic_*).
        """
        return 1

    def check(self, sampling: SamplingConfig) -> None:
        """Raises ConfigError for settings that the policy cannot be combined with. By default it
        refuses those of another policy, which would have no effect.
        """
        for key, value, off in (
            ("rl.zero_variance.dynamic_sampling", sampling.zero_variance.dynamic_sampling, False),
            ("rl.partial_prompts", sampling.partial_prompts, 0),
        ):
            check(
                value == off,
                f"{key} = {value} with {self.key}.name = {self.name!r}: that policy decides which"
                f" groups a step trains on, so {key} would have no effect; set it to {off}, or"
                f" set {self.key} to none",
            )


def default_policy() -> StepPolicy:
    """Returns screening, the step policy of a run that sets none."""
    return seam_class(StepPolicy, "screening")()


def built_in_policy(sampling: SamplingConfig) -> StepPolicy:
    """Returns this package's policy for the settings."""
    if sampling.partial_prompts:
        return seam_class(StepPolicy, "partial")()
    dynamic = sampling.zero_variance.dynamic_sampling
    return seam_class(StepPolicy, "dynamic" if dynamic else "plain")()
