"""Resource limits of the HTTP server, and the socket on which it listens."""

from __future__ import annotations

import contextlib
import ipaddress
import resource
import socket
from dataclasses import dataclass

from compass_jax.config import ConfigError

BACKLOG = 64  # length of the kernel's queue of unaccepted connections
OWN_DESCRIPTORS = 320  # file descriptors for this process's files and devices


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes and timeouts in seconds. A request that exceeds one is rejected."""

    connections: int = 512
    header_bytes: int = 16 * 1024
    body_bytes: int = 2**20
    preparing: int = 128  # maximum number of requests that are received, parsed or tokenised
    prepare_s: float = 30.0  # timeout for receiving, parsing and tokenising a request
    idle_s: int = 60  # keep-alive timeout of a connection
    stop_s: float = 4.0  # grace period of running responses at shutdown
    engine_stop_s: float = 2.0  # grace period of the engine's current step at shutdown


def make_room_for(connections: int, needed: int) -> None:
    """Raises the soft limit of file descriptors if it is too low for `connections`.

    Raises ConfigError if the hard limit is too low, or if `connections` is less than `needed`, the
    number of requests in slots and in the queue.
    """
    option = f"--max-connections {connections}"
    if connections < needed:
        text = f"slots and queue alone may hold {needed - 1}; give at least {needed}"
        raise ConfigError(f"{option}: {text}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # -1: infinite
    required = connections + OWN_DESCRIPTORS
    if 0 <= hard < required:
        raise ConfigError(
            f"{option} needs {required} file descriptors and this process may have {hard}: give at "
            f"most {max(hard - OWN_DESCRIPTORS, 0)}, or raise the limit (ulimit -n)"
        )
    if 0 <= soft < required:
        resource.setrlimit(resource.RLIMIT_NOFILE, (required, hard))


def raise_descriptors() -> None:
    """Raises the soft limit of file descriptors to the hard one."""
    with contextlib.suppress(OSError, ValueError):  # no kernel has infinitely many
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on an address. Raises ConfigError if it cannot be bound."""
    if not host.strip():
        text = "name an interface, 127.0.0.1 for this machine alone, 0.0.0.0 for every one"
        raise ConfigError(f"--host is empty: {text}")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # Pass the protocol: asyncio sets TCP_NODELAY only on sockets that are known to be TCP.
        family, kind, protocol, _, address = min(addresses, key=lambda x: x[0] != socket.AF_INET)
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(BACKLOG)
        except OSError:
            bound.close()
            raise
    except (OSError, ValueError) as error:  # ValueError: a name that no resolver takes
        reason = getattr(error, "strerror", None) or error
        where = f"--host {host[:200]!r} --port {port}"
        raise ConfigError(f"{where}: {reason}; choose another") from error
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Returns whether a bound socket can be reached only from this machine."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback
