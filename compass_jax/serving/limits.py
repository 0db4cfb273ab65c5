"""How much of the HTTP server its clients may take, and the socket on which it listens."""

from __future__ import annotations

import ipaddress
import resource
import socket
from dataclasses import dataclass

from compass_jax.config import ConfigError

BACKLOG = 64  # connections that the kernel holds until they are accepted
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
    option = f"--max-connections {connections}"
    if connections < needed:
        text = f"slots and queue alone may hold {needed - 1}; give at least {needed}"
        raise ConfigError(f"{option}: {text}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # -1: infinite
    wanted = connections + OWN_DESCRIPTORS
    if 0 <= hard < wanted:
        raise ConfigError(
            f"{option} needs {wanted} file descriptors and this process may have {hard}: give at "
            f"most {max(hard - OWN_DESCRIPTORS, 0)}, or raise the limit (ulimit -n)"
        )
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address. ConfigError if that cannot be."""
    if not host.strip():
        text = "name an interface, 127.0.0.1 for this machine alone, 0.0.0.0 for every one"
        raise ConfigError(f"--host is empty: {text}")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # With the protocol: asyncio sends small answers at once (TCP_NODELAY) if it knows TCP.
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
    """Returns whether only this machine reaches a bound socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback
