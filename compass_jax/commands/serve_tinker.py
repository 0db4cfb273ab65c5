"""`compass serve --tinker`: training and sampling for the client of the Tinker API."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from compass_jax.base.extras import how_to_install
from compass_jax.commands.options import Serve
from compass_jax.commands.serve import (
    HttpServer,
    check_options,
    mesh_config,
    model_with_tokenizer,
    rollout_config,
    say,
    with_lengths,
)
from compass_jax.config import ComputeConfig, ConfigError, DataConfig
from compass_jax.config.errors import check
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.rollout.serving.guard import resolve_key
from compass_jax.rollout.serving.limits import Limits, bind, is_loopback, make_room_for
from compass_jax.rollout.serving.server import http_server

if TYPE_CHECKING:
    from compass_jax.apps.tinker.server import TinkerServer

BODY_BYTES = 64 * 2**20  # the client's chunks have about 5 MB, and more for a long datum


@contextlib.contextmanager
def tinker_server(options: Serve) -> Iterator[HttpServer[TinkerServer]]:
    """Yields a server that is ready to `run`: its models are restored and its port is bound.

    Raises ConfigError for unusable options, and if the client's package is not installed.
    """
    check_options(options)
    for name in ("max_models", "max_sessions", "weight_copies"):
        option = f"--{name.replace('_', '-')} {getattr(options, name)}"
        check(getattr(options, name) > 0, f"{option}: must be positive")
    try:
        from compass_jax.apps.tinker.server import TinkerServer
        from compass_jax.apps.tinker.settings import load_base
    except ModuleNotFoundError as error:
        command = how_to_install("tinker", "tinker")
        raise ConfigError(f"compass serve --tinker needs {error.name}: {command}") from error
    limits = Limits(connections=options.max_connections, body_bytes=BODY_BYTES)
    make_room_for(limits.connections, options.slots + 1)
    model, folder = model_with_tokenizer(options.weights)
    options = with_lengths(options, model)
    data = DataConfig(tokenizer=str(folder))
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(bind(options.host, options.port))
        key = resolve_key(options.api_key, is_loopback(bound))
        base = load_base(
            options.weights,
            Path(options.weights).resolve().name,
            load_tokenizer(data, model.vocab_size),
            model,
            ComputeConfig(dtype=options.dtype),
            replace(rollout_config(options), temperature=1.0),
            mesh_config(options),
            options.micro_batch_tokens,
        )
        server = TinkerServer(base)
        server.open(
            states=options.states,
            routes_gib=options.routes_gib,
            max_models=options.max_models,
            max_sessions=options.max_sessions,
            weight_copies=options.weight_copies,
            max_waiting=options.max_waiting,
        )
        stack.callback(server.close, limits.engine_stop_s)
        app = server.app(limits, [options.host, *options.allow_host], key)
        yield HttpServer(http_server(app, limits), bound, server)


def run_tinker(options: Serve) -> None:
    """Serves until a signal ends the process."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), tinker_server(options) as server:
        say(options, server.address, "HTTP, the Tinker API: set TINKER_BASE_URL")
        server.run()
