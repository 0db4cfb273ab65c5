"""`compass serve`: JetStream's gRPC server, or HTTP for OpenAI's clients, over our engine, on weights of a run or of a Hugging Face folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from compass_jax.config import ConfigError, ModelConfig, RolloutConfig, RunConfig
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.openai_requests import Served
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.online import OnlineBatcher
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
    temperature: float = 1.0  # of JetStream's requests, which bring none; 0: greedy
    openai: bool = False  # HTTP instead of gRPC
    max_waiting: int = 64  # HTTP: requests beyond those in slots

    def rollout(self) -> RolloutConfig:
        """The engine's settings. ConfigError for a value that cannot be."""
        if self.prompt_tokens < 16 or self.prompt_tokens > 32768 or self.prompt_tokens & (self.prompt_tokens - 1):
            raise ConfigError(f"--prompt-tokens {self.prompt_tokens}: must be a power of two from 16 to 32768")
        if not 0 < self.port < 65536:
            raise ConfigError(f"--port {self.port}: must be from 1 to 65535")
        if self.openai and self.temperature != 1:
            raise ConfigError(f"--temperature {self.temperature} would do nothing beside --openai: every request brings its own; leave it out")
        if not self.openai and self.max_waiting != ServeConfig.max_waiting:
            raise ConfigError(f"--max-waiting {self.max_waiting} would do nothing without --openai: JetStream queues what comes; leave it out")
        if self.max_waiting < 1:
            raise ConfigError(f"--max-waiting {self.max_waiting}: must be positive")
        buckets = tuple(2**n for n in range(4, 16) if 2**n <= self.prompt_tokens)
        config = RolloutConfig(
            slots=self.slots, prompt_buckets=buckets, max_new_tokens=self.max_new_tokens, temperature=self.temperature,
            tokens_per_call=8 if self.openai else 1,
        )  # fmt: skip
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


def make_engine(config: ServeConfig) -> tuple[Engine, Any, Tokenizer]:
    """(engine, parameters, tokenizer) of what is served."""
    rollout = config.rollout()
    model, params, tokenizer = load(config.weights)
    return Engine(model, RunConfig(name="serve", model=model).compute, rollout, tokenizer.eos_id), params, tokenizer


def start_jetstream(config: ServeConfig) -> Any:
    """Starts JetStream's server, in threads of this process, and returns it (`stop`, `wait_for_termination`).

    ConfigError where google-jetstream is not installed.
    """
    config.rollout()
    try:
        from compass_jax.rollout.jetstream_api import JetStreamEngine, run_server
    except ModuleNotFoundError as error:
        raise _missing("compass serve", error) from error
    return run_server(JetStreamEngine(*make_engine(config), Sampler(config.temperature)), config.host, config.port)


@contextlib.contextmanager
def openai_server(config: ServeConfig) -> Iterator[Any]:
    """A uvicorn server that is ready to `run`, its engine running meanwhile. ConfigError where starlette or uvicorn is not installed."""
    config.rollout()
    try:
        import uvicorn

        from compass_jax.openai_api import Api
    except ModuleNotFoundError as error:
        raise _missing("compass serve --openai", error) from error
    engine, params, tokenizer = make_engine(config)
    served = Served(Path(config.weights).resolve().name, tokenizer, engine.model_config.vocab_size, config.prompt_tokens, config.max_new_tokens)
    with OnlineBatcher(engine, params, config.max_waiting) as batcher:
        yield uvicorn.Server(uvicorn.Config(Api(served, batcher).app(), host=config.host, port=config.port, log_level="warning"))


def _missing(command: str, error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"{command} needs the extra 'serve' ({error}): pip install 'compass_jax[serve]'")


def run_serve(config: ServeConfig) -> None:
    """Serves until the process is told to end."""
    protocol = "HTTP, /v1/completions and /v1/chat/completions" if config.openai else "gRPC, JetStream's Orchestrator"
    told = f"serving {config.weights} on {config.host}:{config.port} ({protocol}); end with ctrl-c"
    if config.openai:
        with openai_server(config) as server:
            print(told, flush=True)
            server.run()
        return
    server = start_jetstream(config)
    print(told, flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # wait_for_termination stops the server then
        server.wait_for_termination()
