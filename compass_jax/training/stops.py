"""A stop between two micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from compass_jax.errors import CompassError

T = TypeVar("T")


class TrainingStopped(CompassError, RuntimeError):
    """A stop was asked for before the step's first update; the parameters are as they were."""


def never() -> bool:
    """Nobody asks."""
    return False


def until(stopped: Callable[[], bool], micros: Iterable[T], results: Sequence[Any]) -> Iterator[T]:
    """The micro-batches, while nobody asks for a stop; TrainingStopped where somebody does.

    `results` grows by one for each: all but the newest are waited for, or the whole step would lie
    in the devices' queue before anybody could ask.
    """
    for micro in micros:
        if stopped is not never:
            jax.block_until_ready(results[-2:-1])
            if stopped():
                raise TrainingStopped("the training was stopped between two micro-batches")
        yield micro
