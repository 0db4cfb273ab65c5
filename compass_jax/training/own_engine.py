"""An engine from outside the package as the sampler of a run."""

from __future__ import annotations

import time
from collections.abc import Callable

from compass_jax.config import ConfigError, ModelConfig, RewardConfig, RLConfig, RunConfig
from compass_jax.config.judge import EngineJudgeConfig
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.model.params import stack
from compass_jax.rollout.engine_api import Engine
from compass_jax.rollout.plain_engine import PlainEngine

# makes an engine with JetStream's contract for a run; the tokenizer has the end tokens
OpenEngine = Callable[[RunConfig, Tokenizer], Engine]


class ByLoading:
    """Gives training parameters to an engine's `load_params`, in the form that
    `weights.hf.save_params` takes. It is a WeightTransport.
    """

    is_local = False  # the weights have another layout than a judge's engine

    def __init__(self, engine: PlainEngine):
        self._load = engine.load_params

    def send(self, params: object, version: int) -> tuple[object, dict[str, float]]:
        """Returns what `load_params` makes of the parameters, and the seconds that it took."""
        started = time.perf_counter()
        weights = self._load(stack(params))
        return weights, {"time/handover_s": time.perf_counter() - started}


def check_own_engine(rl: RLConfig, model: ModelConfig, rewards: RewardConfig) -> None:
    """Raises ConfigError for settings that need this package's engine."""
    needs = "needs the engine of this package"
    if rl.replay == "R3" and model.moe_layers:
        raise ConfigError(
            "rl.replay = 'R3': an engine with JetStream's methods alone returns no routes; use"
            " 'R2', whose routes are those of training's first pass, or 'off'"
        )
    if rl.drafts is not None:
        raise ConfigError(f"rl.drafts {needs}; leave it out")
    judge = rewards.judge
    if isinstance(judge, EngineJudgeConfig) and not judge.weights:
        raise ConfigError(f"rewards.judge as the policy {needs}; set rewards.judge.weights")
