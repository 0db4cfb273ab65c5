"""The batcher of the servers: one thread drives it; other threads submit requests at any time and
read their tokens.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.base.errors import CompassError
from compass_jax.base.records import Prompt
from compass_jax.devices.sharding import fetch
from compass_jax.rollout.batcher import Batcher
from compass_jax.rollout.engine_api import RolloutEngine
from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.rollout.request import Request
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.rollout.sizes import prompt_bucket
from compass_jax.rollout.waiting import split_cancelled

MOST_TOP = 20  # maximum number of likeliest tokens with each token
PER_REQUEST = Sampler(per_request=True, top_logprobs=MOST_TOP)


class Chunk(NamedTuple):
    """A new token of a request, with its log-probs if requested.

    `finish`: "stop" (the last token is an end token), "length", "cancelled", "error", or "" for an
    unfinished request. `prompt`: log-probs of the prompt's tokens, in the first chunk of a request
    for them.
    """

    tokens: list[int]
    finish: str
    top: TopLogprobs | None = None
    prompt: TopLogprobs | None = None


class QueueFull(CompassError, RuntimeError):
    """The waiting queue is full."""


def _discard(chunk: Chunk) -> None:
    """The default of `Streamed.deliver`."""


@dataclass(eq=False)
class Streamed(Request):
    """A request whose tokens are delivered one by one after each call: the batcher's thread calls
    `deliver` with each `Chunk`. It must not block.
    """

    deliver: Callable[[Chunk], None] = _discard
    delivered: int = 0  # number of delivered tokens, prompt included
    of_prompt: bool = False  # whether the log-probs of the prompt's tokens are delivered too

    @classmethod
    def of_client(
        cls,
        tokens: np.ndarray,
        max_new_tokens: int,
        temperature: float,
        deliver: Callable[[Chunk], None],
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        sample: int = 0,
        logprobs: bool = False,
        of_prompt: bool = False,
    ) -> Self:
        """Returns the request of a client. Its draws depend only on (seed, sample, position). A
        request for no new tokens needs no slot.
        """
        # The seed is the prompt's id in the draws' keys, which takes 32 bits.
        prompt = Prompt(seed % 2**32, 0, "", "", np.asarray(tokens, np.int32), "")
        n = len(prompt.tokens)
        options: JsonObject = {"temperature": temperature, "deliver": deliver, "delivered": n}
        options |= {"top_k": top_k, "top_p": top_p}
        options |= {"logprobs": logprobs, "of_prompt": of_prompt}
        return cls.of(prompt, sample, 0, n + max_new_tokens, 0, **options)

    def hand_over(self, finish: str) -> None:
        """Delivers the new tokens, each in a chunk, or the end of a request without new ones."""
        first, self.delivered = self.delivered, len(self.tokens)
        if first == self.delivered and finish:
            self.deliver(Chunk([], finish))
        for i in range(first, self.delivered):
            top = None
            if self.top is not None:
                drawn = i - len(self.prompt.tokens)
                top = TopLogprobs(*(x[drawn : drawn + 1] for x in self.top))
            is_last = i == self.delivered - 1
            self.deliver(Chunk([int(self.tokens[i])], finish if is_last else "", top))


class OnlineBatcher:
    """A batcher and the thread that drives it. Use it as a context manager, or with `start` and
    `stop`.

    An error in the thread ends every request with "error", and the next `submit` raises it.
    """

    def __init__(self, engine: RolloutEngine, params: Tree, max_waiting: int):
        self.engine = engine
        self.max_waiting = max_waiting
        self.error: BaseException | None = None
        self._batcher = Batcher(engine, params, Purpose.SERVE, 0, sampler=PER_REQUEST, streams=True)
        self._asked: deque[list[Streamed]] = deque()  # groups that are not in the batcher yet
        self._alive: dict[Streamed, None] = {}  # unfinished requests in order of arrival
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
        """Ends the thread after its current tick; unfinished requests end as "cancelled". Returns
        False if the tick takes longer than `timeout_s`.
        """
        with self._changed:
            self._running, self._stopped = False, True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, *groups: Sequence[Streamed]) -> None:
        """Queues requests, all or none; those of a group have one prompt and share a prefill.

        Raises QueueFull if the queue has no room now; ValueError for more requests than the queue
        can hold, and for a prompt longer than the engine's limit; RuntimeError after `stop` or a
        failure of the thread.
        """
        requests = [request for group in groups for request in group]
        if len(requests) > self.max_waiting:
            raise ValueError(
                f"{len(requests)} sequences are asked for at once, at most {self.max_waiting} may"
                " wait here: ask for fewer"
            )
        for request in requests:
            if not len(request.tokens):
                raise ValueError("the prompt is empty")
            # raises for a prompt beyond the longest bucket
            prompt_bucket(self.engine.config, len(request.tokens))
            most = len(request.tokens) + self.engine.config.max_new_tokens
            request.limit = min(request.limit, most)
        with self._changed:
            if self.error is not None:
                raise RuntimeError("the engine has failed") from self.error
            if self._stopped:
                raise RuntimeError("the batcher has stopped")
            self._forget_cancelled()
            if self.waiting + len(requests) > self.max_waiting:
                raise QueueFull(
                    f"{self.waiting} requests wait and at most {self.max_waiting} may: try again"
                    " later"
                )
            self._alive.update(dict.fromkeys(requests))
            self._asked.extend(list(group) for group in groups)
            self._changed.notify()

    def cancel(self, requests: Iterable[Streamed]) -> None:
        """Cancels requests; the next tick frees their slots and pages."""
        self._batcher.cancel(*requests)

    @property
    def active(self) -> int:
        """Number of requests in slots."""
        # A copy, because the batcher's thread changes the dictionary.
        return sum(x.slot >= 0 for x in list(self._alive))

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return sum(x.slot < 0 and not (x.is_finished or x.cancelled) for x in list(self._alive))

    def _forget_cancelled(self) -> None:
        """Removes cancelled requests that are not in the batcher yet."""
        groups, self._asked = self._asked, deque()
        for group in groups:
            left, stay = split_cancelled(group)
            self._end(left, "cancelled")
            if stay:
                self._asked.append(stay)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: not self._running or self._alive)
                    if not self._running:
                        break
                self._admit()
                self._tick()
            self._end_all("cancelled")
        except BaseException as error:  # every request must end, whatever the error
            with self._changed:
                self.error = error
            logging.getLogger(__name__).exception("the batcher ended")
            self._end_all("error")

    def _admit(self) -> None:
        """Adds groups to the batcher while it has room, at most one of them with log-probs of its
        prompt, so that sequences in slots wait for one such pass at most.
        """
        scored = False
        while not scored:
            with self._changed:
                self._forget_cancelled()
                if not self._asked or self._batcher.room <= 0:
                    return
                group = self._asked.popleft()
            scored = group[0].of_prompt
            if scored:
                # Without the lock, so that clients can submit during the pass.
                logprobs = self._prompt_logprobs(group[0].prompt.tokens)
                for request in group:
                    request.deliver(Chunk([], "", prompt=logprobs))
            if group[0].limit == len(group[0].tokens):
                self._end(group, "length")
            else:
                self._hand_in(group)

    def _prompt_logprobs(self, prompt: np.ndarray) -> TopLogprobs:
        """Returns the log-probs `[n k]` of a prompt's `n` tokens."""
        n = len(prompt)
        padded = np.zeros((1, prompt_bucket(self.engine.config, n)), np.int32)
        padded[0, :n] = prompt
        prompt_and_length = jnp.asarray(padded), jnp.asarray([n], jnp.int32)
        rows = self.engine.prompt_logprobs(self._batcher.params, *prompt_and_length, MOST_TOP)
        return TopLogprobs(*(x[:n] for x in fetch(rows)))

    def _hand_in(self, group: Sequence[Streamed]) -> None:
        """Adds a group. Its prefill draws a power of two of samples, so that few shapes are
        compiled.
        """
        first = min(request.column for request in group)
        width = max(request.column for request in group) + 1 - first
        self._batcher.add(group, range(first, first + 2 ** (width - 1).bit_length()))

    def _tick(self) -> None:
        """Steps the batcher once and delivers the new tokens."""
        self._batcher.step()
        for request in list(self._alive):
            if request.is_finished:
                stopped = int(request.tokens[-1]) in self.engine.end_ids
                self._end([request], "stop" if stopped else "length")
            else:
                request.hand_over("")

    def _end(self, requests: Sequence[Streamed], finish: str) -> None:
        with self._changed:
            for request in requests:
                self._alive.pop(request, None)
        for request in requests:
            request.hand_over("cancelled" if request.cancelled else finish)

    def _end_all(self, finish: str) -> None:
        with self._changed:
            left = list(self._alive)
            self._alive.clear()
            self._asked.clear()
        for request in left:
            request.deliver(Chunk([], finish))
