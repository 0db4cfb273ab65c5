"""Requests for a turn of an episode, on their way from a server's thread to the rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from compass_jax.base.aliases import JsonObject
from compass_jax.base.errors import CompassError


class Ask(NamedTuple):
    """A request of a driver for a turn. `answer` takes the reply, or what is wrong with it.

    `sampling` are the sampling parameters that the request names, `stops` its stop tokens. `agent`
    tells the agents of an episode apart; empty: it has one.
    """

    session: str
    tokens: np.ndarray
    limit: int
    sampling: JsonObject
    stops: tuple[int, ...]
    answer: Callable[[Reply | CompassError], None]
    agent: str = ""


class Reply(NamedTuple):
    """A sampled turn."""

    tokens: np.ndarray
    logp: np.ndarray
    stopped: bool  # by an end token, not by length


class Left(NamedTuple):
    """A driver's connection was closed before its reply."""

    ask: Ask
