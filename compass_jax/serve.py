"""`compass serve`: JetStream's gRPC server over our engine, on weights of a run or of a Hugging Face folder."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from compass_jax.config import ConfigError, ModelConfig, RolloutConfig, RunConfig
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Sampler
from compass_jax.weights.handover import hand_over
from compass_jax.weights.hf import init_or_load, model_of, tokenizer_beside


@dataclass(frozen=True)
class ServeConfig:
    """What is served, where, and how large it may grow."""

    weights: str  # a run directory, one checkpoint, or a Hugging Face folder
    host: str = "127.0.0.1"
    port: int = 9000
    slots: int = 16  # requests that are decoded together
    prompt_tokens: int = 256  # longest prompt, a power of two; of a longer one the last tokens are kept
    max_new_tokens: int = 256
    temperature: float = 1.0  # 0: greedy

    def rollout(self) -> RolloutConfig:
        """The engine's settings. ConfigError for a value that cannot be."""
        if self.prompt_tokens < 16 or self.prompt_tokens > 32768 or self.prompt_tokens & (self.prompt_tokens - 1):
            raise ConfigError(f"--prompt-tokens {self.prompt_tokens}: must be a power of two from 16 to 32768")
        if not 0 < self.port < 65536:
            raise ConfigError(f"--port {self.port}: must be from 1 to 65535")
        buckets = tuple(2**n for n in range(4, 16) if 2**n <= self.prompt_tokens)
        config = RolloutConfig(
            slots=self.slots, prompt_buckets=buckets, max_new_tokens=self.max_new_tokens, tokens_per_call=1, temperature=self.temperature
        )
        config.validate()
        return config


def load(weights: str) -> tuple[ModelConfig, Any, Tokenizer]:
    """(model, parameters in the decode layout, tokenizer). ConfigError where there is no such folder or no tokenizer beside the weights."""
    if not Path(weights).is_dir():
        raise ConfigError(f"{weights}: there is no such folder; give a run directory, a checkpoint, or a Hugging Face folder")
    model, folder = model_of(weights), tokenizer_beside(weights)
    if folder is None:
        raise ConfigError(f"{weights} has no tokenizer beside it: serve the run directory, or an exported folder with tokenizer.json")
    config = RunConfig(name="serve", model=model, init_from=weights)
    params, _ = hand_over(init_or_load(config, jax.random.key(0)), config.compute.dtype)
    return model, params, Tokenizer.load(folder)


def start(config: ServeConfig) -> Any:
    """Starts the server, in threads of this process, and returns it (`stop`, `wait_for_termination`).

    ConfigError where google-jetstream is not installed.
    """
    rollout = config.rollout()
    try:
        from compass_jax.rollout.jetstream_api import JetStreamEngine, run_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"compass serve needs google-jetstream ({error}): pip install 'compass_jax[serve]'") from error
    model, params, tokenizer = load(config.weights)
    engine = Engine(model, RunConfig(name="serve", model=model).compute, rollout, tokenizer.eos_id)
    return run_server(JetStreamEngine(engine, params, tokenizer, Sampler(config.temperature)), config.host, config.port)


def run_serve(config: ServeConfig) -> None:
    """Serves until the process is told to end."""
    server = start(config)
    print(f"serving {config.weights} on {config.host}:{config.port} (gRPC, JetStream's Orchestrator); end with ctrl-c", flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # wait_for_termination stops the server then
        server.wait_for_termination()
