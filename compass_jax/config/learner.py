"""The settings of the learner, which needs no model, file or run directory of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from compass_jax.config.algorithm import AlgorithmConfig
from compass_jax.config.data import RolloutConfig
from compass_jax.config.lora import LoRAConfig
from compass_jax.config.ranges import Section, Seed
from compass_jax.config.rewards import RewardConfig
from compass_jax.config.sampling import SamplingConfig
from compass_jax.config.updates import UpdatesConfig


@dataclass(frozen=True)
class LearnerConfig(Section):
    """The settings that the learner reads (`RunConfig.learner`)."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """What an update computes."""
    updates: UpdatesConfig = field(default_factory=UpdatesConfig)
    """Updates of a rollout, their micro-batches and the optimiser."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Number and size of the groups, which are the rows of a rollout."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Temperature and lengths of the rollout."""
    rewards: RewardConfig = field(default_factory=RewardConfig)
    """Rewards from which on an answer is right or wrong."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Low-rank adapters, which are trained instead of the model's weights."""
    seed: Seed = 0
    """Seed of the adapters' first values (a number)."""
    labelled: bool = False
    """Whether samples have a gold label, against which inverted pairs are counted."""

    def _check(self, key: str) -> None:
        super()._check(key)
        self.updates.check_whole_groups(self.sampling.prompts_per_step)
