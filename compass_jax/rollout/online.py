"""Continuous batching for requests that come at any time: one thread owns the slots, others hand in
requests and read their tokens.

The training rollout (collect.py) knows its requests beforehand and is driven by them; here they
arrive, stream and are cancelled.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.errors import CompassError
from compass_jax.rollout.engine import DecodeState, Engine
from compass_jax.rollout.sampling import Purpose, Sampler, sample_keys

PER_REQUEST = Sampler(per_request=True)


class Chunk(NamedTuple):
    """New tokens of a request, with their log-probs. `finish`: "stop" (they end with the end
    token), "length", "cancelled", "error", or "": go on.
    """

    tokens: list[int]
    logp: list[float]
    finish: str


class Full(CompassError, RuntimeError):
    """As many requests wait as may."""


@dataclass(eq=False)
class Request:
    """One sequence to generate. `deliver` is called with each `Chunk`, in the batcher's thread; it
    must not block.
    """

    tokens: np.ndarray  # int32 [t]
    max_new_tokens: int
    temperature: float
    deliver: Callable[[Chunk], None]
    seed: int = 0
    sample: int = 0
    cancelled: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """Gives the request up; its slot is free at the next tick."""
        self.cancelled = True


class OnlineBatcher:
    """Runs `engine` on whatever was submitted. Use it as a context manager, or `start` and `stop`
    it.

    ValueError for an engine whose slots share pages. A request's draws depend on (seed, sample,
    position) alone. An error in the thread ends every request with "error" and is raised by the
    next `submit`.
    """

    def __init__(self, engine: Engine, params: Any, max_waiting: int):
        if engine.config.cache_pages:
            raise ValueError(
                f"rollout.cache_pages = {engine.config.cache_pages}: OnlineBatcher assigns no"
                " pages; use 0"
            )
        self.engine, self.params, self.max_waiting = engine, params, max_waiting
        self.error: BaseException | None = None
        self._waiting: deque[Request] = deque()
        self._owner: list[Request | None] = [None] * engine.config.slots
        self._given = np.zeros(engine.config.slots, np.int64)
        self._changed = threading.Condition()
        self._running = self._stopped = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)

    def __enter__(self) -> OnlineBatcher:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the thread."""
        self._running = True
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Ends the thread after its present tick; what is not finished ends as "cancelled".

        False where the tick lasts longer than `timeout_s`.
        """
        with self._changed:
            self._running, self._stopped = False, True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, *requests: Request) -> None:
        """Queues requests, all or none. Full if they do not fit into the queue now; ValueError for
        more than ever do, and for a prompt that the engine cannot hold.

        RuntimeError after `stop`, or when the thread has failed: nobody would answer.
        """
        if len(requests) > self.max_waiting:
            raise ValueError(
                f"{len(requests)} sequences are asked for at once, at most {self.max_waiting} may"
                " wait here: ask for fewer"
            )
        for request in requests:
            if not len(request.tokens):
                raise ValueError("the prompt is empty")
            self.engine.bucket(len(request.tokens))
        with self._changed:
            if self.error is not None:
                raise RuntimeError("the engine has failed") from self.error
            if self._stopped:
                raise RuntimeError("the batcher has stopped")
            if len(self._waiting) + len(requests) > self.max_waiting:
                self._forget_cancelled()
            if len(self._waiting) + len(requests) > self.max_waiting:
                raise Full(
                    f"{len(self._waiting)} requests wait and at most {self.max_waiting} may: try"
                    " again later"
                )
            self._waiting.extend(requests)
            self._changed.notify()

    @property
    def active(self) -> int:
        """Requests that hold a slot."""
        return sum(owner is not None for owner in self._owner)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def _forget_cancelled(self) -> None:
        """Requests that were given up while they waited make room for others."""
        left = [request for request in self._waiting if request.cancelled]
        self._waiting = deque(request for request in self._waiting if not request.cancelled)
        for request in left:
            request.deliver(Chunk([], [], "cancelled"))

    def _run(self) -> None:
        try:
            state = self.engine.init_decode_state()
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: not self._running or self._waiting or self.active
                    )
                    if not self._running:
                        break
                state = self._admit(state)
                state = self._step(state)
            self._end_all("cancelled")
        except BaseException as error:  # whatever it is, nobody may wait for it for ever
            with self._changed:
                self.error = error
            logging.getLogger(__name__).exception("the batcher ended")
            self._end_all("error")

    def _end_all(self, finish: str) -> None:
        with self._changed:
            left = [*self._waiting, *(owner for owner in self._owner if owner is not None)]
            self._waiting.clear()
            self._owner = [None] * len(self._owner)
        for request in left:
            request.deliver(Chunk([], [], finish))

    def _admit(self, state: DecodeState) -> DecodeState:
        """Gives up cancelled requests, and puts waiting ones into free slots, one prefill each."""
        for slot, owner in enumerate(self._owner):
            if owner is not None and owner.cancelled:
                state = self.engine.free_resource(jnp.int32(slot), state)
                self._finish(slot, Chunk([], [], "cancelled"))
        for slot in (s for s, owner in enumerate(self._owner) if owner is None):
            request = self._next()
            if request is None:
                break
            state = self._insert(state, request, slot)
        return state

    def _next(self) -> Request | None:
        while True:
            with self._changed:
                if not self._waiting:
                    return None
                request = self._waiting.popleft()
            if not request.cancelled:
                return request
            request.deliver(Chunk([], [], "cancelled"))

    def _insert(self, state: DecodeState, request: Request, slot: int) -> DecodeState:
        # from here on an error finds it
        self._owner[slot], self._given[slot] = request, len(request.tokens)
        length, bucket = len(request.tokens), self.engine.bucket(len(request.tokens))
        tokens = np.zeros((1, bucket), np.int32)
        tokens[0, :length] = request.tokens
        one = np.zeros(1, np.uint32)
        keys = _keys(
            jnp.asarray(one + np.uint32(request.seed % 2**32)),
            jnp.asarray(one),
            jnp.asarray(one + np.uint32(request.sample)),
        )
        prefix = self.engine.prefill_multisampling(
            params=self.params,
            padded_tokens=jnp.asarray(tokens),
            true_length=jnp.asarray([length], jnp.int32),
            sampler=PER_REQUEST,
            rng=keys[None],
            num_samples=1,
            temperature=jnp.asarray([request.temperature], jnp.float32),
        )
        return self.engine.bulk_insert(
            prefix,
            state,
            jnp.asarray([[slot]], jnp.int32),
            jnp.asarray([request.max_new_tokens], jnp.int32),
        )

    def _step(self, state: DecodeState) -> DecodeState:
        """One generate call, and the new tokens of every request to whoever waits for them."""
        if not self.active:
            return state
        config = self.engine.config
        lengths = np.asarray(state.lengths)
        longest = max(int(lengths[s]) for s, owner in enumerate(self._owner) if owner is not None)
        read = min(
            config.max_length,
            -(-(longest + config.tokens_per_call) // config.cache_bucket) * config.cache_bucket,
        )
        state, _ = self.engine.generate(self.params, state, PER_REQUEST, read=read)
        tokens, logp, lengths, live = jax.device_get(
            (state.tokens, state.logp, state.lengths, state.live)
        )
        for slot, owner in enumerate(self._owner):
            if owner is None:
                continue
            first, last = int(self._given[slot]), int(lengths[slot])
            self._given[slot] = last
            finish = (
                ""
                if live[slot]
                else "stop"
                if tokens[slot, last - 1] == self.engine.eos_id
                else "length"
            )
            chunk = Chunk(
                tokens[slot, first:last].tolist(), logp[slot, first:last].tolist(), finish
            )
            if finish:
                self._finish(slot, chunk)
            else:
                owner.deliver(chunk)
        return state

    def _finish(self, slot: int, chunk: Chunk) -> None:
        owner, self._owner[slot] = self._owner[slot], None
        if owner is not None:
            owner.deliver(chunk)


_keys = jax.jit(lambda ids, visits, samples: sample_keys(0, Purpose.SERVE, ids, visits, samples))
