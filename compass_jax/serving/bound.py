"""A socket that is bound before the model is loaded."""

from __future__ import annotations

import ipaddress
import socket

from compass_jax.config import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to the first address of `host`, IPv4 before IPv6. ConfigError if that
    cannot be.
    """
    if not host.strip():
        raise ConfigError(
            "--host is empty: name an interface, 127.0.0.1 for this machine alone, "
            "0.0.0.0 for every one"
        )
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:  # ValueError: a name that no resolver takes
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host[:200]!r}: {reason}") from error
    family, kind, protocol, _, address = min(found, key=lambda x: x[0] is not socket.AF_INET)
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        text = f"{error.strerror}; choose another"
        raise ConfigError(f"--host {host} --port {port}: {text}") from error
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Returns whether only this machine reaches a bound socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback
