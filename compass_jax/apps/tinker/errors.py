"""Errors that a client reads."""

from __future__ import annotations

from compass_jax.rollout.serving.errors import ApiError


class RequestError(ApiError):
    """A request that the server cannot answer. The message names the problem and the remedy, and no
    path of the server.
    """


class RestoredError(RequestError):
    """A request that counts on updates which a restart has lost."""


def refuse(feature: str, remedy: str) -> RequestError:
    """Returns the error for a feature of the Tinker API that this server does not have."""
    return RequestError(f"{feature}: this server does not have it; {remedy}")
