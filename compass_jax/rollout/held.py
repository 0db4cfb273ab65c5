"""Slots that keep the keys of an episode while its environment works: its next turn computes only
the tokens that are new.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from compass_jax.base.records import EPISODE
from compass_jax.rollout.batcher import Batcher
from compass_jax.rollout.prefill import Extension
from compass_jax.rollout.request import Request
from compass_jax.rollout.sampling import RowSampling
from compass_jax.rollout.sizes import extension_sizes, resume_bucket


class HoldingBatcher(Batcher):
    """A batcher in which a turn's slot holds its keys after the turn, until other requests need the
    slot or the weights change; the slots that have waited longest are given up first.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._held: dict[int, Request] = {}  # by slot, in the order in which they left

    def renew(self, params: Any, version: int) -> None:
        """Continues under other weights, and gives up the keys of the former ones."""
        super().renew(params, version)
        self._give_up(list(self._held))

    def forget(self, samples: Container[tuple[tuple[int, int], int]]) -> None:
        """Gives up the keys of samples, by prompt and column, that do not go on."""
        slots = [n for n, x in self._held.items() if (x.prompt.key, x.column) in samples]
        self._give_up(slots)

    def _leave(self, requests: Sequence[Request]) -> None:
        slots = [request.slot for request in requests]
        super()._leave(requests)
        for slot, request in zip(slots, requests, strict=True):
            goes_on = len(request.tokens) < self.engine.config.max_length
            if request.prompt.turns == EPISODE and goes_on and not request.cancelled:
                self._held[slot] = request
                self.slots.held.add(slot)

    def _give_up(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._held[slot]
            self.slots.held.remove(slot)

    def _fill(self) -> list[Request]:
        waiting = self._waiting
        for request in list(waiting.resumable):
            slot = self._slot_of(request)
            if slot is not None:
                waiting.resumable.remove(request)
                self._extend(request, slot)
        short = len(waiting) - len(self.slots.free())
        self._give_up(list(self._held)[: max(short, 0)])
        return super()._fill()

    def _slot_of(self, request: Request) -> int | None:
        """Returns the slot that holds the keys of an earlier turn of a request."""
        for slot, earlier in self._held.items():
            n = len(earlier.tokens)
            goes_on = (earlier.prompt.key, earlier.column) == (request.prompt.key, request.column)
            if (
                goes_on
                and self._sizes(request, n - 1)
                and np.array_equal(earlier.tokens, request.tokens[:n])
            ):
                return slot
        return None

    def _sizes(self, request: Request, known: int) -> list[int]:
        """Returns the padded numbers of new tokens that hold those after the `known` ones."""
        config, length = self.engine.config, len(request.tokens)
        sizes = extension_sizes(config, resume_bucket(config, length))
        return [size for size in sizes if size >= length - known]

    def _extend(self, request: Request, slot: int) -> None:
        """Continues a request in the slot that holds its keys."""
        known = len(self._held[slot].tokens) - 1  # its last token was no input yet
        self._give_up([slot])
        self.slots.enter(request, deque([slot]))
        new, length = request.tokens[known:], len(request.tokens)
        size = self._sizes(request, known)[0]
        padded = resume_bucket(self.engine.config, length)
        sampling = None
        if self.sampler.per_request:
            values = np.float32(request.temperature), np.int32(request.top_k)
            sampling = RowSampling(*map(jnp.atleast_1d, (*values, np.float32(request.top_p))))
        column = range(request.column, request.column + 1)
        self.stats.prefills += 1
        self.stats.prefill_tokens += len(new)
        engine: Any = self.engine  # of this package: others have no `extend`
        extension = Extension(
            jnp.int32(slot),
            jnp.asarray(np.pad(request.tokens, (0, padded - length))),
            jnp.asarray(np.pad(new, (0, size - len(new)))),
            jnp.int32(known),
            jnp.int32(length),
            self._keys([request], [column], 1),
            sampling,
        )
        prefix = engine.extend(self.params, self._state, extension, self.sampler)
        left = np.array([request.limit - length], np.int32)
        self._bulk_insert(prefix, np.array([[slot]], np.int32), left)
