"""`compass serve`: JetStream's gRPC server, or an HTTP server for OpenAI's clients, over this
package's engine, with the weights of a run or of a Hugging Face folder.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from compass_jax.aliases import Tree
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

# requirements of the HTTP server, from the extra "serve"
HTTP_PACKAGES = ("uvicorn", "starlette", "pydantic", "prometheus_client")


HTTP_OPTIONS = ("max_waiting", "max_connections", "api_key", "allow_host", "trust_prompts")


def rollout_config(options: Serve) -> RolloutConfig:
    """Returns the engine's settings. Raises ConfigError for unusable options."""
    longest = options.prompt_tokens
    if not 16 <= longest <= 32768 or longest & (longest - 1):
        raise ConfigError(f"--prompt-tokens {longest}: must be a power of two from 16 to 32768")
    if not (0 if options.openai else 1) <= options.port < 65536:
        text = "must be from 1 to 65535, or 0 with --openai for any that is free"
        raise ConfigError(f"--port {options.port}: {text}")
    if options.openai and options.temperature != 1:
        text = "would do nothing beside --openai: every request brings its own; leave it out"
        raise ConfigError(f"--temperature {options.temperature} {text}")
    for name in HTTP_OPTIONS if not options.openai else ():
        if (value := getattr(options, name)) != getattr(Serve, name, None):
            option = f"--{name.replace('_', '-')}{'' if name == 'api_key' else f' {value}'}"
            text = "would do nothing without --openai: JetStream queues requests; leave it out"
            raise ConfigError(f"{option} {text}")
    if options.max_waiting < 1:
        raise ConfigError(f"--max-waiting {options.max_waiting}: must be positive")
    config = RolloutConfig(
        slots=options.slots,
        prompt_buckets=tuple(2**n for n in range(4, 16) if 2**n <= longest),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        tokens_per_call=8,
        cache_pages=options.cache_pages,
        page_tokens=options.page_tokens,
        dtype=options.dtype,
        quantize=options.quantize,
        kv_quantize=options.kv_quantize,
    )
    config.validate()
    return config


def mesh_config(options: Serve) -> MeshConfig:
    """Returns the mesh of `--mesh`. Raises ConfigError unless it is as expert=4,tensor=2."""
    axes = [axis.name for axis in fields(MeshConfig)]
    sizes: dict[str, int] = {}
    for part in options.mesh.split(",") if options.mesh else ():
        name, _, size = part.partition("=")
        if name not in axes or name in sizes or not (size.isascii() and size.isdigit()):
            text = f"must be as expert=4,tensor=2; the axes are {', '.join(axes)}"
            raise ConfigError(f"--mesh {options.mesh!r}: {text}")
        sizes[name] = int(size)
    return MeshConfig(**sizes)


def make_engine(options: Serve) -> tuple[Engine, Tree, Tokenizer]:
    """Returns (engine, parameters, tokenizer); the parameters have the layout and mesh of a rollout
    with these settings.

    Raises ConfigError if the folder does not exist or has no tokenizer.
    """
    rollout, mesh, weights = rollout_config(options), mesh_config(options), options.weights
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
    data = DataConfig(tokenizer=str(folder), chat_format=options.chat_format)
    data.validate()
    run = RunConfig(name="serve", model=model, rollout=rollout, mesh=mesh, data=data)
    return decoder_of(run, weights)


def start_jetstream(options: Serve) -> Any:
    """Starts JetStream's server in threads of this process, and returns it (`stop`,
    `wait_for_termination`).

    Raises ConfigError if google-jetstream is not installed.
    """
    rollout_config(options)
    try:
        from compass_jax.rollout.jetstream_api import JetStreamEngine, run_server
    except ModuleNotFoundError as error:
        raise _missing("compass serve", error, "google-jetstream") from error
    return run_server(
        JetStreamEngine(*make_engine(options), Sampler(options.temperature)),
        options.host,
        options.port,
    )


class HttpServer(NamedTuple):
    """A uvicorn server and its listening socket."""

    server: uvicorn.Server
    socket: socket

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port."""
        return self.socket.getsockname()[:2]

    def run(self) -> None:
        """Serves until a signal ends the process or `server.should_exit` is set."""
        self.server.run([self.socket])


@contextlib.contextmanager
def openai_server(options: Serve) -> Iterator[HttpServer]:
    """Yields a server that is ready to `run`: its port is bound and its engine is running.

    Raises ConfigError for a missing package, an address that cannot be bound, a host that other
    machines can reach without a key, and more connections than file descriptors.
    """
    rollout_config(options)
    try:
        from compass_jax.serving.guard import resolve_key
        from compass_jax.serving.openai_api import make_app
        from compass_jax.serving.openai_requests import Served
        from compass_jax.serving.server import http_server
    except ModuleNotFoundError as error:
        raise _missing("compass serve --openai", error, *HTTP_PACKAGES) from error
    limits = Limits(connections=options.max_connections)
    make_room_for(limits.connections, options.slots + options.max_waiting + 1)
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(bind(options.host, options.port))
        key = resolve_key(options.api_key, is_loopback(bound))
        engine, params, tokenizer = make_engine(options)
        served = Served(
            Path(options.weights).resolve().name,
            tokenizer,
            tokenizer.vocab_size,
            options.prompt_tokens,
            options.max_new_tokens,
            options.trust_prompts,
        )
        batcher = OnlineBatcher(engine, params, options.max_waiting)
        batcher.start()
        stack.callback(batcher.stop, limits.engine_stop_s)
        app = make_app(served, batcher, limits, [options.host, *options.allow_host], key)
        yield HttpServer(http_server(app, limits), bound)


def _missing(command: str, error: ModuleNotFoundError, *packages: str) -> ConfigError:
    return ConfigError(f"{command} needs {error.name}: {how_to_install('serve', *packages)}")


def run_serve(options: Serve) -> None:
    """Serves until a signal ends the process."""
    with contextlib.suppress(KeyboardInterrupt):
        if options.openai:
            # a signal to end is no failure, even before the server listens and during its shutdown
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            with openai_server(options) as server:
                routes = "HTTP, /v1/completions and /v1/chat/completions"
                _say(options, *server.address, routes)
                server.run()
            return
        _check_address(options)
        server = start_jetstream(options)
        _say(options, options.host, options.port, "gRPC, JetStream's Orchestrator")
        server.wait_for_termination()  # stops the server at ctrl-c


def _say(options: Serve, host: str, port: int, protocol: str) -> None:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    most = f"; at most {options.max_connections} connections" if options.openai else ""
    print(f"serving {options.weights} on {where} ({protocol}{most}); end with ctrl-c", flush=True)


def _check_address(options: Serve) -> None:
    """Raises ConfigError for an address that cannot be bound: gRPC does not report it."""
    with bind(options.host, options.port) as probe:
        if not is_loopback(probe):
            text = "whoever reaches this host may use the server: JetStream's protocol has no key"
            print(f"compass serve: {text}", file=sys.stderr)
