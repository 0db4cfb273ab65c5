"""The settings that a sampler receives from the training."""

from __future__ import annotations

from dataclasses import dataclass

from compass_jax.config import ComputeConfig, MeshConfig, ModelConfig, RolloutConfig


@dataclass(frozen=True)
class EngineSettings:
    """The settings of a sampler's engine, and of the weights that it gets."""

    model: ModelConfig
    compute: ComputeConfig
    rollout: RolloutConfig
    mesh: MeshConfig
    end_ids: tuple[int, ...]
    known: int  # token ids below it are tokens
    quantize: str  # type of 8-bit weights, as the training resolves rollout.quantize
    stored: bool  # whether 8-bit weights are stored as such, or emulated
