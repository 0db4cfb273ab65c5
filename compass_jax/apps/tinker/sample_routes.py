"""The routes of finished samples, on the devices, which training requests name by sequence id."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from compass_jax.apps.tinker.errors import RequestError
from compass_jax.apps.tinker.rows import Rows, Span
from compass_jax.base.aliases import Tree
from compass_jax.config import ConfigError
from compass_jax.rollout.engine import Engine


class Recorded(NamedTuple):
    """A finished sample."""

    tokens: np.ndarray  # prompt and response
    prompt: int  # tokens of the prompt
    row: int  # in the route buffer


class Replay(NamedTuple):
    """Where the routes of a request's tokens are in the buffer; out of range where unset."""

    rows: np.ndarray  # int32 [b t]
    positions: np.ndarray  # int32 [b t]
    missing: int  # datums that name routes which are gone
    tokens: int  # number of tokens whose routes are replayed


class SampleRoutes:
    """A bounded buffer with the routes of samples. The least recently used ones go first.

    A dense model has no routes: its buffer keeps nothing.

    Args:
        engine: the engine that samples.
        gib: size of the buffer.
    """

    def __init__(self, engine: Engine, gib: float):
        shape = jax.eval_shape(lambda: engine.new_routes(1))
        self.keeps = shape is not None
        count = 2 * engine.config.slots
        if shape is not None:
            size = math.prod(shape.shape) * shape.dtype.itemsize
            count = int(gib * 2**30 / size)
            least = 2 * engine.config.slots
            if count < least:
                need = math.ceil(least * size / 2**20) / 1024
                raise ConfigError(
                    f"--routes-gib {gib}: has room for {count} samples, and {engine.config.slots}"
                    f" slots need {least}; give at least {need:.3g}"
                )
        self.buffer = engine.route_buffer(count + 1, 1, self.keeps)
        self.buffer.allocate()  # a row without a sample, so that the buffer keeps its memory
        self.evicted = 0
        self._free = count
        self._samples: OrderedDict[str, Recorded] = OrderedDict()

    def allocate(self) -> int | None:
        """Returns a row for a new sample; None while unfinished samples have all of them."""
        if not self._free:
            if not self._samples:
                return None
            _, oldest = self._samples.popitem(last=False)
            self.evicted += 1
            self.release(oldest.row)
        self._free -= 1
        return self.buffer.allocate()

    def release(self, row: int) -> None:
        """Frees the row of a sample that is not recorded."""
        self._free += 1
        self.buffer.free(row)

    def record(self, sequence: str, tokens: np.ndarray, prompt: int, row: int) -> None:
        """Stores a finished sample by its sequence id."""
        if self.keeps:
            self._samples[sequence] = Recorded(tokens, prompt, row)
        else:
            self.release(row)

    def stored(self) -> Tree:
        """Returns the routes of all rows."""
        return self.buffer.rows

    def locate(self, rows: Rows) -> Replay:
        """Returns where the routes of a request's tokens are. A datum without spans, or with one of
        a sample that is gone, has none. Raises RequestError for a span with other tokens than the
        sample has.
        """
        nowhere, missing, count = len(self.buffer), 0, 0
        places = np.full((2, *rows.tokens.shape), nowhere, np.int32)
        for i, spans in enumerate(rows.spans if self.keeps else ()):
            if any(span.length and span.sequence not in self._samples for span in spans):
                missing += 1
                continue
            tokens = rows.tokens[i, : rows.lengths[i] - 1]
            count += self._place(spans, tokens, places[:, i], f"datum {i}")
        return Replay(places[0], places[1], missing, count)

    def _place(
        self, spans: Sequence[Span], tokens: np.ndarray, places: np.ndarray, where: str
    ) -> int:
        """Fills in the places of a datum's tokens; returns the number of replayed ones."""
        at = count = 0
        for span in spans:
            if not span.length:
                continue
            sample = self._samples[span.sequence]
            self._samples.move_to_end(span.sequence)
            first = span.offset + (sample.prompt if span.sampled else 0)
            last = first + span.length
            end = len(sample.tokens) if span.sampled else sample.prompt
            part = tokens[at : at + span.length]
            if last > end or not np.array_equal(sample.tokens[first:last], part):
                text = f"{where}: model_input_spans name tokens {first} to {last} of a sequence"
                raise RequestError(f"{text} that has other tokens there; name its own tokens")
            # A sample's last token was no input of the model, so it has no route.
            routed = min(last, len(sample.tokens) - 1) - first
            places[0, at : at + routed] = sample.row
            places[1, at : at + routed] = np.arange(first, first + routed)
            at, count = at + span.length, count + routed
        return count
