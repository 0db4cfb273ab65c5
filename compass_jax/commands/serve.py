"""`compass serve`: an HTTP server for OpenAI's clients, or JetStream's gRPC server, over this
package's engine, with the weights of a run or of a Hugging Face folder.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from compass_jax.base.aliases import Tree
from compass_jax.base.extras import how_to_install
from compass_jax.commands.options import Serve
from compass_jax.config import (
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from compass_jax.config.errors import check
from compass_jax.config.foreign import hub_hint
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.devices.machine import usable_bytes
from compass_jax.experience.evaluate import decoder_of
from compass_jax.model.params import param_count
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.online import OnlineBatcher
from compass_jax.rollout.sampling import Sampler
from compass_jax.rollout.serving.guard import resolve_key
from compass_jax.rollout.serving.limits import Limits, bind, is_loopback, make_room_for
from compass_jax.rollout.serving.openai_api import make_app
from compass_jax.rollout.serving.openai_requests import Served
from compass_jax.rollout.serving.server import http_server
from compass_jax.training.memory import process_bytes
from compass_jax.weights.start import model_of, tokenizer_beside

if TYPE_CHECKING:
    import uvicorn

S = TypeVar("S")
SHORTEST, LONGEST = 16, 32768  # of --prompt-tokens
PROMPT, ANSWER = 256, 256  # tokens of the longest prompt and answer by default, if they fit
CACHE_SHARE = 0.5  # KV caches' share of the memory that the weights leave, without --prompt-tokens
HTTP_OPTIONS = (
    *("max_waiting", "max_connections", "api_key", "allow_host", "trust_prompts"),
    "chat_format",
)
TINKER_OPTIONS = (
    *("states", "routes_gib", "max_models", "max_sessions", "weight_copies"),
    "micro_batch_tokens",
)


def rollout_config(options: Serve) -> RolloutConfig:
    """Returns the engine's settings; lengths that are not set have their defaults. Raises
    ConfigError for unusable options.
    """
    check_options(options)
    longest = PROMPT if options.prompt_tokens is None else options.prompt_tokens
    config = RolloutConfig(
        slots=options.slots,
        prompt_buckets=tuple(2**n for n in range(4, 16) if 2**n <= longest),
        max_new_tokens=ANSWER if options.max_new_tokens is None else options.max_new_tokens,
        temperature=options.temperature,
        # a client of HTTP sees each token when it is decoded
        tokens_per_call=8 if options.jetstream or options.tinker else 1,
        cache_pages=options.cache_pages,
        page_tokens=options.page_tokens,
        dtype=options.dtype,
        quantize=options.quantize,
        kv_quantize=options.kv_quantize,
    )
    config.validate()
    return config


def check_options(options: Serve) -> None:
    """Raises ConfigError for options that no model could be served with."""
    longest = PROMPT if options.prompt_tokens is None else options.prompt_tokens
    text = f"must be a power of two from {SHORTEST} to {LONGEST}"
    is_power = SHORTEST <= longest <= LONGEST and not longest & (longest - 1)
    check(is_power, f"--prompt-tokens {longest}: {text}")
    text = "must be from 1 to 65535, or 0 without --jetstream for any that is free"
    check(int(options.jetstream) <= options.port < 65536, f"--port {options.port}: {text}")
    text = "would do nothing without --jetstream: every request brings its own; leave it out"
    acts = options.jetstream or options.temperature == 1
    check(acts, f"--temperature {options.temperature} {text}")
    text = "one server has one protocol; leave --openai out"
    check(not (options.jetstream and options.openai), f"--jetstream --openai: {text}")
    text = "one server has one protocol; leave the other option out"
    check(not (options.tinker and (options.jetstream or options.openai)), f"--tinker: {text}")
    for name in () if options.tinker else TINKER_OPTIONS:
        value, text = getattr(options, name), "would do nothing without --tinker; leave it out"
        check(value == getattr(Serve, name), f"--{name.replace('_', '-')} {value}: {text}")
    for name in ("trust_prompts", "chat_format") if options.tinker else ():
        value, text = getattr(options, name), "would do nothing with --tinker, whose clients send"
        option = f"--{name.replace('_', '-')} {value}"
        check(value == getattr(Serve, name), f"{option}: {text} tokens; leave it out")
    for name in HTTP_OPTIONS if options.jetstream else ():
        if (value := getattr(options, name)) != getattr(Serve, name, None):
            option = f"--{name.replace('_', '-')}{'' if name == 'api_key' else f' {value}'}"
            text = "would do nothing with --jetstream, which queues requests itself; leave it out"
            raise ConfigError(f"{option} {text}")
    check(options.max_waiting > 0, f"--max-waiting {options.max_waiting}: must be positive")


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


def with_lengths(options: Serve, model: ModelConfig) -> Serve:
    """Returns the options with the maximum numbers of tokens of an answer and of a prompt, which
    fit together into the model's context and the cache pages.

    An answer has 256 tokens, or half of a shorter context. A prompt has the largest power of two,
    at most LONGEST, for which the KV caches fit into half of the memory that the weights leave; 256
    if the memory allows less. Raises ConfigError for lengths that do not fit.
    """
    context, prompt = model.max_positions, options.prompt_tokens
    if options.cache_pages:
        context = min(context, options.cache_pages * options.page_tokens)
    answer = options.max_new_tokens
    if answer is None:
        answer = max(1, min(ANSWER, context // 2, context - (prompt or 0)))
    check(
        (prompt or SHORTEST) + answer <= context,
        f"--prompt-tokens {prompt or SHORTEST} --max-new-tokens {answer}: together more than"
        f" the {context} tokens of the model's context and the cache pages; lower one of them",
    )
    width = 1 if options.kv_quantize != "off" else {"float32": 4, "bfloat16": 2}[options.dtype]
    free = mesh_config(options).devices * (usable_bytes() - process_bytes())
    free -= 4 * param_count(model)
    sequence = (
        CACHE_SHARE * free / (max(options.slots, 1) * model.layers * model.cache_width * width)
    )
    longest = min(max(int(sequence) - answer, PROMPT), context - answer, LONGEST)
    prompt = prompt or 2 ** (longest.bit_length() - 1)
    return replace(options, prompt_tokens=prompt, max_new_tokens=answer)


def make_engine(options: Serve) -> tuple[Engine, Tree, Tokenizer]:
    """Returns (engine, parameters, tokenizer); the parameters have the layout and mesh of a rollout
    with these settings.

    Raises ConfigError if the folder does not exist or has no tokenizer.
    """
    weights = options.weights
    model, folder = model_with_tokenizer(weights)
    options = with_lengths(options, model)
    rollout, mesh = rollout_config(options), mesh_config(options)
    mesh.validate("--mesh", model)
    data = DataConfig(tokenizer=str(folder), chat_format=options.chat_format)
    data.validate()
    run = RunConfig(name="serve", model=model, rollout=rollout, mesh=mesh, data=data)
    return decoder_of(run.policy, data, run.seed, weights)


def model_with_tokenizer(weights: str) -> tuple[ModelConfig, Path]:
    """Returns the model of a folder of weights, and the folder of its tokenizer. Raises ConfigError
    if either is missing.
    """
    if not Path(weights).is_dir():
        hint = hub_hint(weights) or "give a run directory, a checkpoint, or a Hugging Face folder"
        raise ConfigError(f"{weights}: there is no such folder; {hint}")
    model, folder = model_of(weights), tokenizer_beside(weights)
    if folder is None:
        raise ConfigError(
            f"{weights} has no tokenizer beside it: serve the run directory, or an exported folder"
            " with tokenizer.json"
        )
    return model, folder


def start_jetstream(options: Serve) -> Any:
    """Starts JetStream's server in threads of this process, and returns it (`stop`,
    `wait_for_termination`).

    Raises ConfigError if google-jetstream is not installed.
    """
    check_options(options)
    try:
        from compass_jax.rollout.jetstream_api import JetStreamEngine, run_server
    except ModuleNotFoundError as error:
        command = how_to_install("serve", "google-jetstream")
        raise ConfigError(f"compass serve --jetstream needs {error.name}: {command}") from error
    return run_server(
        JetStreamEngine(*make_engine(options), Sampler(options.temperature)),
        options.host,
        options.port,
    )


@dataclass(frozen=True)
class HttpServer(Generic[S]):
    """A uvicorn server, its listening socket, and what it serves."""

    server: uvicorn.Server
    socket: socket
    served: S

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port."""
        return self.socket.getsockname()[:2]

    def run(self) -> None:
        """Serves until a signal ends the process or `server.should_exit` is set."""
        self.server.run([self.socket])


@contextlib.contextmanager
def openai_server(options: Serve) -> Iterator[HttpServer[Served]]:
    """Yields a server that is ready to `run`: its port is bound and its engine is running.

    Raises ConfigError for an address that cannot be bound, a host that other machines can reach
    without a key, and more connections than file descriptors.
    """
    check_options(options)
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
            engine.config.prompt_buckets[-1],
            engine.config.max_new_tokens,
            options.trust_prompts,
        )
        batcher = OnlineBatcher(engine, params, options.max_waiting)
        batcher.start()
        stack.callback(batcher.stop, limits.engine_stop_s)
        app = make_app(served, batcher, limits, [options.host, *options.allow_host], key)
        yield HttpServer(http_server(app, limits), bound, served)


def run_serve(options: Serve) -> None:
    """Serves until a signal ends the process."""
    with contextlib.suppress(KeyboardInterrupt):
        if options.jetstream:
            _check_address(options)
            jetstream = start_jetstream(options)
            say(options, (options.host, options.port), "gRPC, JetStream's Orchestrator")
            jetstream.wait_for_termination()  # stops the server at ctrl-c
            return
        # a signal to end is no failure, even before the server listens and during its shutdown
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with openai_server(options) as server:
            limits = (
                f"prompts of at most {server.served.prompt_tokens} tokens, answers of"
                f" {server.served.max_new_tokens}; at most {options.max_connections} connections"
            )
            routes = f"HTTP, /v1/completions and /v1/chat/completions; {limits}"
            say(options, server.address, routes)
            server.run()


def say(options: Serve, address: tuple[str, int], protocol: str) -> None:
    """Prints what is served, and where."""
    host, port = address
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    print(f"serving {options.weights} on {where} ({protocol}); end with ctrl-c", flush=True)


def _check_address(options: Serve) -> None:
    """Raises ConfigError for an address that cannot be bound: gRPC does not report it."""
    with bind(options.host, options.port) as probe:
        if not is_loopback(probe):
            text = "whoever reaches this host may use the server: JetStream's protocol has no key"
            print(f"compass serve: {text}", file=sys.stderr)
