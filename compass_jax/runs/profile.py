"""A profiler trace of some steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeVar

import jax

from compass_jax.config import ConfigError

FOLDER = "profile"
T = TypeVar("T")


def check_steps(span: tuple[int, ...]) -> None:
    """Raises ConfigError unless `span` is empty or (first step, last step)."""
    if span and not (len(span) == 2 and 1 <= span[0] <= span[1]):
        raise ConfigError(
            f"--profile-steps {' '.join(map(str, span))}: two numbers are needed, the first and"
            " the last step of the trace, from 1"
        )


def traced(
    steps: Iterator[T],
    number_of: Callable[[T], int],
    done: int,
    span: tuple[int, ...],
    directory: str,
    note: Callable[[str], None],
) -> Generator[T]:
    """Yields from `steps`, of which step `done` + 1 is the first, and writes a trace of the steps
    `span` (first and last; empty: none) to the folder `profile` of the run's directory.
    `number_of` returns a step's number.

    A run that ends before the last one writes the trace up to its end. Another run in the same
    directory adds its own trace.
    """
    if not span:
        yield from steps
        return
    (first, last), step, tracing, folder = span, done, False, Path(directory) / FOLDER

    def end() -> None:
        jax.profiler.stop_trace()
        note(f"trace of the steps up to {step}: {folder} (TensorBoard's profile plugin)")

    try:
        while True:
            # `next` computes the step, so its trace must begin before.
            if not tracing and first <= step + 1 <= last:
                jax.profiler.start_trace(folder)
                tracing = True
            item = next(steps, None)
            if item is None:
                return
            step = number_of(item)
            if tracing and step >= last:
                tracing = False
                end()
            yield item
    finally:
        if tracing:
            end()
