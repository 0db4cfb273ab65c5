"""An engine from outside the package as the sampler of a run."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

from compass_jax.config import (
    ConfigError,
    ModelConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
)
from compass_jax.config.errors import check
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


def check_own_engine(
    rl: RLConfig,
    model: ModelConfig,
    rollout: RolloutConfig,
    rewards: RewardConfig,
    has_own_devices: bool,
) -> None:
    """Raises ConfigError for settings that need this package's engine. has_own_devices: whether
    the rollout runs on other devices than the training, or in samplers.
    """
    needs = "needs the engine of this package; leave it out"
    if rl.replay == "R3" and model.moe_layers:
        raise ConfigError(
            "rl.replay = 'R3': an engine with JetStream's methods alone returns no routes; use"
            " 'R2', whose routes are those of training's first pass, or 'off'"
        )
    check(rl.drafts is None, f"rl.drafts {needs}")
    check(not rl.entropy.keep, f"rl.entropy.keep {needs}")
    check(not rollout.hold_sessions, f"rollout.hold_sessions {needs}")
    check(not has_own_devices, f"rollout_apart and samplers: each {needs}")
    for name in ("quantize", "kv_quantize"):
        check(getattr(rollout, name) == "off", f"rollout.{name} {needs}")
    judge = rewards.judge
    is_policy = isinstance(judge, EngineJudgeConfig) and not judge.weights
    check(not is_policy, f"rewards.judge as the policy {needs}, or set rewards.judge.weights")
    check(
        jax.process_count() == 1,
        f"an engine from outside with {jax.process_count()} processes: it samples in one; start one"
        " process",
    )


def check_samplers(engine: PlainEngine, evaluated: bool) -> None:
    """Raises ConfigError where the run evaluates, with greedy answers too, and the engine samples
    at the rollout's temperature alone.
    """
    check(
        engine.takes_sampler or not evaluated,
        f"{type(engine.inner).__name__} takes no sampler, and the run samples at other temperatures"
        " than rollout.temperature: give its `prefill` and `generate` a parameter `sampler`, or set"
        " data.eval_prompts to 0 and data.eval_sets to ()",
    )
