"""How much of the HTTP server its clients may take."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from compass_jax.config import ConfigError

OWN_DESCRIPTORS = 320  # files and devices of this process


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes and timeouts in seconds. A request that exceeds one is refused."""

    connections: int = 512
    header_bytes: int = 16 * 1024
    body_bytes: int = 2**20
    preparing: int = 128  # requests that are received, parsed and tokenised at the same time
    prepare_s: float = 30.0  # to receive, parse and tokenise a request
    idle_s: int = 60  # between two requests of a connection
    stop_s: float = 4.0  # that running answers get when the server is told to end
    engine_stop_s: float = 2.0  # that the engine's present step gets then


def make_room_for(connections: int, needed: int) -> None:
    """Raises the soft limit of file descriptors if `connections` do not fit below it.

    ConfigError if the hard limit is too low, or if `connections` are fewer than `needed`, those of
    all requests in slots and in the queue.
    """
    if connections < needed:
        text = f"slots and queue alone may hold {needed - 1}; give at least {needed}"
        raise ConfigError(f"--max-connections {connections}: {text}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OWN_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            most = max(hard - OWN_DESCRIPTORS, 0)
            raise ConfigError(
                f"--max-connections {connections} needs {wanted} file descriptors and this process "
                f"may have {hard}: give at most {most}, or raise the limit (ulimit -n)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
