"""Stops between two micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import jax

from compass_jax.base.aliases import Tree
from compass_jax.base.errors import CompassError

T = TypeVar("T")


class TrainingStopped(CompassError, RuntimeError):
    """A stop was requested before the step's first update; the parameters are unchanged."""


def never_stop() -> bool:
    """Returns False: a stop predicate that is always false."""
    return False


def stoppable(
    should_stop: Callable[[], bool], micros: Iterable[T], results: Sequence[Tree]
) -> Iterator[T]:
    """Yields the micro-batches; raises TrainingStopped once `should_stop()` is true.

    `results` grows by one per micro-batch. All but the newest are waited for; otherwise the whole
    step would be queued on the devices before a stop could take effect.
    """
    for micro in micros:
        if should_stop is not never_stop:
            jax.block_until_ready(results[-2:-1])
            if should_stop():
                raise TrainingStopped("the training was stopped between two micro-batches")
        yield micro
