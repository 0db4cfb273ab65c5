"""`compass serve`: JetStream's gRPC server, or HTTP for OpenAI's clients, over our engine, on
weights of a run or of a Hugging Face folder.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from compass_jax.commands.options import Serve
from compass_jax.config import ConfigError, DataConfig, MeshConfig, RolloutConfig, RunConfig
from compass_jax.config.foreign import hub_hint
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.experience.evaluate import decoder_of
from compass_jax.extras import how_to_install
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.online import OnlineBatcher
from compass_jax.rollout.sampling import Sampler
from compass_jax.serving.limits import Limits, bind, is_loopback, make_room_for
from compass_jax.weights.start import model_of, tokenizer_beside

if TYPE_CHECKING:
    import uvicorn

# what the HTTP server needs, of the extra "serve"
HTTP_PACKAGES = ("uvicorn", "starlette", "pydantic", "prometheus_client")


@dataclass(frozen=True)
class ServeConfig(Serve):
    """The options of `compass serve`, and the limits of its clients."""

    limits: Limits = field(default_factory=Limits)

    def rollout(self) -> RolloutConfig:
        """The engine's settings. ConfigError for a value that cannot be."""
        if (
            self.prompt_tokens < 16
            or self.prompt_tokens > 32768
            or self.prompt_tokens & (self.prompt_tokens - 1)
        ):
            raise ConfigError(
                f"--prompt-tokens {self.prompt_tokens}: must be a power of two from 16 to 32768"
            )
        if not (0 if self.openai else 1) <= self.port < 65536:
            text = "must be from 1 to 65535, or 0 with --openai for any that is free"
            raise ConfigError(f"--port {self.port}: {text}")
        if self.openai and self.temperature != 1:
            text = "would do nothing beside --openai: every request brings its own; leave it out"
            raise ConfigError(f"--temperature {self.temperature} {text}")
        if not self.openai:
            http = ("max_waiting", "max_connections", "api_key", "allow_host", "trust_prompts")
            if given := [x for x in http if getattr(self, x) not in (getattr(ServeConfig, x), [])]:
                value = "" if given[0] == "api_key" else f" {getattr(self, given[0])}"
                option = f"--{given[0].replace('_', '-')}{value}"
                text = "would do nothing without --openai: JetStream queues what comes"
                raise ConfigError(f"{option} {text}; leave it out")
        if self.max_waiting < 1:
            raise ConfigError(f"--max-waiting {self.max_waiting}: must be positive")
        buckets = tuple(2**n for n in range(4, 16) if 2**n <= self.prompt_tokens)
        config = RolloutConfig(
            slots=self.slots,
            prompt_buckets=buckets,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            tokens_per_call=8,
            cache_pages=self.cache_pages,
            page_tokens=self.page_tokens,
            dtype=self.dtype,
            quantize=self.quantize,
            kv_quantize=self.kv_quantize,
        )
        config.validate()
        return config

    def mesh_config(self) -> MeshConfig:
        """The mesh that `mesh` names. ConfigError for what is no axis or no number."""
        axes = [axis.name for axis in fields(MeshConfig)]
        sizes: dict[str, int] = {}
        for part in self.mesh.split(",") if self.mesh else ():
            name, _, size = part.partition("=")
            if name not in axes or name in sizes or not (size.isascii() and size.isdigit()):
                text = f"must be as expert=4,tensor=2; the axes are {', '.join(axes)}"
                raise ConfigError(f"--mesh {self.mesh!r}: {text}")
            sizes[name] = int(size)
        return MeshConfig(**sizes)


def make_engine(config: ServeConfig) -> tuple[Engine, Any, Tokenizer]:
    """(engine, parameters in its layout and on its mesh, tokenizer) of what is served: those of a
    rollout with these settings. ConfigError where there is no such folder or no tokenizer beside
    the weights.
    """
    rollout, mesh, weights = config.rollout(), config.mesh_config(), config.weights
    if not Path(weights).is_dir():
        hint = hub_hint(weights) or "give a run directory, a checkpoint, or a Hugging Face folder"
        raise ConfigError(f"{weights}: there is no such folder; {hint}")
    model, folder = model_of(weights), tokenizer_beside(weights)
    if folder is None:
        raise ConfigError(
            f"{weights} has no tokenizer beside it: serve the run directory, or an exported folder"
            " with tokenizer.json"
        )
    mesh.validate("--mesh", model)
    data = DataConfig(tokenizer=str(folder))
    run = RunConfig(name="serve", model=model, rollout=rollout, mesh=mesh, data=data)
    return decoder_of(run, weights)


def start_jetstream(config: ServeConfig) -> Any:
    """Starts JetStream's server, in threads of this process, and returns it (`stop`,
    `wait_for_termination`).

    ConfigError where google-jetstream is not installed.
    """
    config.rollout()
    try:
        from compass_jax.rollout.jetstream_api import JetStreamEngine, run_server
    except ModuleNotFoundError as error:
        raise _missing("compass serve", error, "google-jetstream") from error
    return run_server(
        JetStreamEngine(*make_engine(config), Sampler(config.temperature)), config.host, config.port
    )


class HttpServer(NamedTuple):
    """A uvicorn server, and the socket on which it listens."""

    server: uvicorn.Server
    socket: socket

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port."""
        return self.socket.getsockname()[:2]

    def run(self) -> None:
        """Serves until the process is told to end, or `server.should_exit` is set."""
        self.server.run([self.socket])


@contextlib.contextmanager
def openai_server(config: ServeConfig) -> Iterator[HttpServer]:
    """Yields a server that is ready to `run`, its port bound and its engine running meanwhile.

    ConfigError if a package is missing, if the address cannot be bound, for a host that other
    machines reach without a key, and for more connections than file descriptors.
    """
    config.rollout()
    try:
        from compass_jax.serving.guard import resolve_key
        from compass_jax.serving.openai_api import make_app
        from compass_jax.serving.openai_requests import Served
        from compass_jax.serving.server import http_server
    except ModuleNotFoundError as error:
        raise _missing("compass serve --openai", error, *HTTP_PACKAGES) from error
    limits = replace(config.limits, connections=config.max_connections)
    make_room_for(limits.connections, config.slots + config.max_waiting + 1)
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(bind(config.host, config.port))
        key = resolve_key(config.api_key, is_loopback(bound))
        engine, params, tokenizer = make_engine(config)
        served = Served(
            Path(config.weights).resolve().name,
            tokenizer,
            tokenizer.vocab_size,
            config.prompt_tokens,
            config.max_new_tokens,
            config.trust_prompts,
        )
        batcher = OnlineBatcher(engine, params, config.max_waiting)
        batcher.start()
        stack.callback(batcher.stop, limits.engine_stop_s)
        app = make_app(served, batcher, limits, [config.host, *config.allow_host], key)
        yield HttpServer(http_server(app, limits), bound)


def _missing(command: str, error: ModuleNotFoundError, *packages: str) -> ConfigError:
    return ConfigError(f"{command} needs {error.name}: {how_to_install('serve', *packages)}")


def run_serve(config: ServeConfig) -> None:
    """Serves until the process is told to end."""
    with contextlib.suppress(KeyboardInterrupt):
        if config.openai:
            # to be told to end is no failure, before the server listens and while it ends, too
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            with openai_server(config) as server:
                routes = "HTTP, /v1/completions and /v1/chat/completions"
                _say(config, *server.address, routes)
                server.run()
            return
        _check_address(config)
        server = start_jetstream(config)
        _say(config, config.host, config.port, "gRPC, JetStream's Orchestrator")
        server.wait_for_termination()  # stops the server at ctrl-c


def _say(config: ServeConfig, host: str, port: int, protocol: str) -> None:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    most = f"; at most {config.max_connections} connections" if config.openai else ""
    print(f"serving {config.weights} on {where} ({protocol}{most}); end with ctrl-c", flush=True)


def _check_address(config: ServeConfig) -> None:
    """Raises ConfigError if JetStream's server could not bind its address, which gRPC would not
    say.
    """
    with bind(config.host, config.port) as probe:
        if not is_loopback(probe):
            text = "whoever reaches this host may use the server: JetStream's protocol has no key"
            print(f"compass serve: {text}", file=sys.stderr)
