"""Sockets that are bound before anything slow begins, and whom they let in."""

from __future__ import annotations

import ipaddress
import socket

from compass_jax.config import ConfigError
from compass_jax.serving.limits import Limits


def bind(host: str, port: int, limits: Limits) -> socket.socket:
    """A socket bound to the first address of `host`, IPv4 before IPv6. ConfigError, in one line,
    where that cannot be."""
    if not host.strip():
        raise ConfigError(
            "--host is empty: name an interface, 127.0.0.1 for this machine alone, "
            "0.0.0.0 for every one"
        )
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(
            found, key=lambda info: info[0] is not socket.AF_INET
        )
        listening = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:  # ValueError: a name that no resolver takes
        raise ConfigError(
            f"--host {host[:200]!r}: {getattr(error, 'strerror', None) or error}"
        ) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, limits.send_buffer_bytes // 2
        )  # the kernel doubles it
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror}; choose another"
        ) from error
    return listening


def is_loopback(listening: socket.socket) -> bool:
    """Whether only this machine reaches a bound socket."""
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback
