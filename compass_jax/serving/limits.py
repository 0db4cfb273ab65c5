"""How much of the HTTP server one client, and all of them together, may take."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from compass_jax.config import ConfigError

BACKLOG = 64  # connections that the kernel holds until they are accepted
OWN_DESCRIPTORS = 320  # files, devices, and what one flood may have in the air before it is closed


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes, deadlines in seconds, and places. Whoever exceeds one is refused or closed;
    nobody queues for it."""

    connections: int = 512
    header_bytes: int = 16 * 1024
    body_bytes: int = 2**20
    small_body_bytes: int = 64 * 1024  # a body up to this size needs no place among the large ones
    large_bodies: int = 8  # that are received and prepared at once
    large_rest: float = 3.0  # times as long as one took, until the next one is prepared
    preparing: int = 256  # small requests that are parsed and tokenised at once
    send_buffer_bytes: int = 256 * 1024  # of the kernel, for each connection
    header_s: float = (
        10.0  # from the connection's start, or a request's first byte, to the end of its header
    )
    body_s: float = 30.0  # from the end of the header to the end of the body
    idle_s: float = 60.0  # between two requests
    stall_s: float = 30.0  # for a reader to take what was written
    prepare_s: float = 15.0  # to parse and tokenise
    stop_s: float = 4.0  # that running answers get when the server is told to end
    engine_stop_s: float = 2.0  # that the engine's present step gets then
    end_s: float = 9.0  # after which it ends whatever is still going on


def make_room_for(connections: int, needed: int) -> None:
    """Raises the soft limit of descriptors where `connections` do not fit below it.

    ConfigError where the hard limit is too low, or where fewer connections than `needed` (those
    that requests in slots and in the queue hold) would let requests that were accepted lock out the
    next one.
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
