"""The error of a setting that cannot be used."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the key, the value and what is allowed."""


def check(ok: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `ok`."""
    if not ok:
        raise ConfigError(message)
