"""A policy: a model, its devices and its sampler."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compass_jax.config.data import RolloutConfig
from compass_jax.config.errors import check
from compass_jax.config.lora import LoRAConfig
from compass_jax.config.mesh import MeshConfig
from compass_jax.config.model import ComputeConfig, ModelConfig
from compass_jax.config.ranges import Section
from compass_jax.config.samplers import SamplersConfig


@dataclass(frozen=True)
class PolicyConfig(Section):
    """A model, its devices and its sampler (`RunConfig.policy`, which documents the fields)."""

    model: ModelConfig
    lora: LoRAConfig
    compute: ComputeConfig
    mesh: MeshConfig
    rollout_mesh: MeshConfig | None
    rollout_apart: bool
    samplers: SamplersConfig
    rollout: RolloutConfig

    @property
    def sampling_mesh(self) -> MeshConfig:
        """The mesh of the rollout."""
        return self.rollout_mesh or self.mesh

    @property
    def local_rollout_mesh(self) -> MeshConfig | None:
        """The mesh on which these processes sample in RL; None: the training's."""
        return None if self.samplers.acts else self.rollout_mesh

    @property
    def rollout_compute(self) -> ComputeConfig:
        """The computation of the sampler: the training's, with `rollout.dtype`."""
        return replace(self.compute, dtype=self.rollout.dtype or self.compute.dtype)

    def check_agreement(self) -> None:
        """Raises ConfigError for sections that contradict each other."""
        check(
            self.rollout.max_length <= self.model.max_positions,
            f"rollout.prompt_buckets + max_new_tokens = {self.rollout.max_length} tokens exceed"
            f" model.max_positions = {self.model.max_positions}",
        )
        self.mesh.validate("mesh", self.model)
        self.sampling_mesh.validate("rollout_mesh", self.model)
        sampling = self.sampling_mesh.devices
        check(
            self.rollout_apart or self.samplers.acts or sampling == self.mesh.devices,
            f"rollout_mesh has {sampling} devices, mesh {self.mesh.devices}: on the same devices"
            " both need as many; set rollout_apart to give the rollout its own",
        )
        check(
            not (self.rollout_apart and self.samplers.acts),
            "samplers with rollout_apart: both say where the rollout runs; leave one of them out",
        )
        narrow = "bfloat16" in (self.compute.dtype, self.rollout_compute.dtype)
        parts = self.compute.float32_parts
        check(
            not parts or narrow,
            f"compute.float32_parts = {parts}: neither compute.dtype nor rollout.dtype is bfloat16,"
            " so it would do nothing",
        )
