"""The settings of a run: frozen dataclasses, one for each component, composed into `RunConfig`.

Each class checks its own values in `validate()`. `RunConfig.validate()` calls them all and then
checks the settings that must agree between components. An error names the key in the form of the
command line (`rl.group_size`). Classes that a jitted function takes as static arguments are
hashable.

A function takes no more than it reads: a section, or the sections that `RunConfig.policy`,
`RunConfig.scored` or `RunConfig.learner` put together. `RLConfig` inherits the settings of its
three consumers.
"""

from __future__ import annotations

from compass_jax.config.advantage import Advantage
from compass_jax.config.algorithm import AlgorithmConfig, ShapingConfig
from compass_jax.config.apply import apply
from compass_jax.config.correction import Correction, named_correction
from compass_jax.config.data import (
    DataConfig,
    EpisodeSource,
    EvalConfig,
    EvalSet,
    FileSource,
    ProceduralSource,
    RolloutConfig,
    TaskSource,
)
from compass_jax.config.drafts import Drafts
from compass_jax.config.entropy import EntropyConfig
from compass_jax.config.errors import ConfigError
from compass_jax.config.guard import GuardConfig
from compass_jax.config.judge import EngineJudgeConfig, JudgeConfig, ScalarJudgeConfig
from compass_jax.config.learner import LearnerConfig
from compass_jax.config.log import LogConfig
from compass_jax.config.mesh import MeshConfig
from compass_jax.config.model import ComputeConfig, MLAConfig, ModelConfig, MoEConfig
from compass_jax.config.objective import Objective
from compass_jax.config.policy import PolicyConfig
from compass_jax.config.predictor import Predictor
from compass_jax.config.rewards import RewardConfig
from compass_jax.config.rl_stage import RLStage
from compass_jax.config.rope import LinearRope, Llama3Rope, RopeScaling, YarnRope
from compass_jax.config.router import Router
from compass_jax.config.run import RunConfig
from compass_jax.config.samplers import SamplersConfig
from compass_jax.config.sampling import SamplingConfig
from compass_jax.config.scored import ScoredConfig
from compass_jax.config.seam import Seam, seam_class
from compass_jax.config.sft import SFTConfig
from compass_jax.config.step_hook import StepHook
from compass_jax.config.step_policy import StepPolicy
from compass_jax.config.training import RLConfig, SelectionConfig, ZeroVarianceConfig
from compass_jax.config.updates import OptimConfig, UpdatesConfig

__all__ = [
    "Advantage",
    "AlgorithmConfig",
    "ComputeConfig",
    "ConfigError",
    "Correction",
    "DataConfig",
    "Drafts",
    "EngineJudgeConfig",
    "EntropyConfig",
    "EpisodeSource",
    "EvalConfig",
    "EvalSet",
    "FileSource",
    "GuardConfig",
    "JudgeConfig",
    "LearnerConfig",
    "LinearRope",
    "Llama3Rope",
    "LogConfig",
    "MLAConfig",
    "MeshConfig",
    "MoEConfig",
    "ModelConfig",
    "Objective",
    "OptimConfig",
    "PolicyConfig",
    "Predictor",
    "ProceduralSource",
    "RLConfig",
    "RLStage",
    "RewardConfig",
    "RolloutConfig",
    "RopeScaling",
    "Router",
    "RunConfig",
    "SFTConfig",
    "SamplersConfig",
    "SamplingConfig",
    "ScalarJudgeConfig",
    "ScoredConfig",
    "Seam",
    "SelectionConfig",
    "ShapingConfig",
    "StepHook",
    "StepPolicy",
    "TaskSource",
    "UpdatesConfig",
    "YarnRope",
    "ZeroVarianceConfig",
    "apply",
    "named_correction",
    "seam_class",
]
