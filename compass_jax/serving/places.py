"""Work of requests on threads of its own: so many at once, within a deadline, and nobody queues
without bound."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from compass_jax.serving.errors import BadRequest


class Places:
    """Runs jobs on `threads` threads. Whoever finds all `places` taken is refused at once; whoever
    waits longer than `deadline_s` for a result is told so, and the place stays taken until the
    thread is done with the job. Before its next job a thread rests `rest` times as long as the last
    one took, so that these jobs leave the interpreter to others most of the time."""

    def __init__(self, name: str, threads: int, places: int, deadline_s: float, rest: float = 0.0):
        self.places = places
        self.rest = rest
        self.taken = 0
        self._name = name
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._rested = threading.local()  # until when the thread rests
        self._ended = threading.Event()
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, job: Callable[..., Any], *arguments: Any) -> Any:
        """What `job(*arguments)` returns. BadRequest with 429 where no place is free, with 503
        after the deadline."""
        with self._lock:
            if self.taken >= self.places:
                raise BadRequest(
                    f"{self.taken} {self._name} are being prepared: try again later", status=429
                )
            self.taken += 1
        future = self._executor.submit(self._work, job, *arguments)
        future.add_done_callback(self._leave)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            text = f"the request could not be prepared within {self._deadline_s:g} s"
            raise BadRequest(f"{text}: send less, or try again later", status=503) from error

    def _work(self, job: Callable[..., Any], *arguments: Any) -> Any:
        self._ended.wait(getattr(self._rested, "until", 0.0) - time.monotonic())
        began = time.monotonic()
        try:
            return job(*arguments)
        finally:
            ended = time.monotonic()
            self._rested.until = ended + self.rest * (ended - began)

    def _leave(self, future: Future) -> None:
        with self._lock:
            self.taken -= 1

    def close(self) -> None:
        """Starts no further job, and does not wait for those that run."""
        self._ended.set()
        self._executor.shutdown(wait=False, cancel_futures=True)


class Writer:
    """One thread on which tokens become text and answers become JSON, in the order in which they
    come."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="writer")

    def run(
        self,
        loop: asyncio.AbstractEventLoop,
        put: Callable[[Any], Any],
        job: Callable[..., Any],
        *arguments: Any,
    ) -> None:
        """Hands what `job(*arguments)` returns, unless it is None, to `put` in the event loop.
        `job` must not raise. Nothing is done once the writer or the loop is closed: nobody waits
        for it then."""

        def work() -> None:
            found = job(*arguments)
            if found is not None:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(put, found)

        with contextlib.suppress(RuntimeError):
            self._executor.submit(work)

    async def wait(self, job: Callable[..., Any], *arguments: Any) -> Any:
        """What `job(*arguments)` returns."""
        return await asyncio.wrap_future(self._executor.submit(job, *arguments))

    def close(self) -> None:
        """Ends the thread after the job that runs."""
        self._executor.shutdown(wait=False, cancel_futures=True)
