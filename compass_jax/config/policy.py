"""A policy: the settings of a model, its weights, devices, sampler and prompts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Self

from compass_jax.config.data import DataConfig, RolloutConfig
from compass_jax.config.errors import check
from compass_jax.config.lora import LoRAConfig
from compass_jax.config.mesh import MeshConfig
from compass_jax.config.model import ComputeConfig, ModelConfig
from compass_jax.config.ranges import Range, Section
from compass_jax.config.samplers import SamplersConfig


@dataclass(frozen=True)
class PolicyConfig(Section):
    """A policy and its prompts: all settings that decoding with given weights needs."""

    name: str
    """Name of the run and of its folder under runs/."""
    model: ModelConfig
    """The sizes of the model that is trained, in the terms of its Hugging Face config."""
    run_dir: str = ""
    """Run directory; empty: runs/NAME (`sft` and `train`: runs/NAME/sft and runs/NAME/rl)."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of every random draw of the run (a number)."""
    init_from: str = ""
    """Initial weights: a Hugging Face folder or checkpoint; empty: random weights."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Low-rank adapters, which are trained instead of the model's weights."""
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    """Computation of the model: types, rematerialisation, kernels."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Mesh of the training: devices along each axis."""
    rollout_mesh: MeshConfig | None = None
    """Mesh of the rollout: devices along each axis; None: the training's mesh."""
    rollout_apart: bool = False
    """Disaggregated rollout on separate devices, numbered after the training's; with
    rl.one_step_off both run at once.
    """
    samplers: SamplersConfig = field(default_factory=SamplersConfig)
    """Disaggregated rollout of RL over hosts: samplers in other processes, each with the devices of
    rollout_mesh.
    """
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling of answers."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts of training and evaluation."""

    @property
    def directory(self) -> str:
        """The run directory."""
        return self.run_dir or f"runs/{self.name}"

    def with_rollout_mesh(self) -> Self:
        """Returns the configuration with a rollout_mesh, of one device where it is None, so that
        single axes can be set.
        """
        return self if self.rollout_mesh else replace(self, rollout_mesh=MeshConfig())

    @property
    def local_rollout_mesh(self) -> MeshConfig | None:
        """The mesh on which these processes sample in RL; None: the training's."""
        return None if self.samplers.acts else self.rollout_mesh

    @property
    def rollout_compute(self) -> ComputeConfig:
        """The computation of the sampler: the training's, with `rollout.dtype`."""
        return replace(self.compute, dtype=self.rollout.dtype or self.compute.dtype)

    def _check(self, key: str) -> None:
        check(bool(self.name), "name is empty: give the run a name")
        check(
            "://" not in self.run_dir,
            f"run_dir = {self.run_dir!r}: must be a path; mount the bucket (gcsfuse; launch/ does"
            " it with --bucket) and name the mount's folder",
        )
        super()._check(key)
        check(
            self.rollout.max_length <= self.model.max_positions,
            f"rollout.prompt_buckets + max_new_tokens = {self.rollout.max_length} tokens exceed"
            f" model.max_positions = {self.model.max_positions}",
        )
        check(
            not self.lora.acts or bool(self.init_from),
            f"lora.rank = {self.lora.rank}: adapters need a base, and init_from is empty: name the"
            " model whose weights stay",
        )
        self.mesh.validate("mesh", self.model)
        (self.rollout_mesh or self.mesh).validate("rollout_mesh", self.model)
        sampling = (self.rollout_mesh or self.mesh).devices
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
