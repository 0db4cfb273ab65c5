"""Scored answers: prompts, sampler, verifiers."""

from __future__ import annotations

from dataclasses import dataclass

from compass_jax.config.data import DataConfig, EvalConfig, RolloutConfig
from compass_jax.config.ranges import Section
from compass_jax.config.rewards import RewardConfig


@dataclass(frozen=True)
class ScoredConfig(Section):
    """Prompts, the sampling of answers and their verdicts (`RunConfig.scored`, which documents the
    fields).
    """

    seed: int
    rollout: RolloutConfig
    data: DataConfig
    rewards: RewardConfig
    evaluation: EvalConfig
