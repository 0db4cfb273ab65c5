"""The answers to requests, which clients fetch by the request's id."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Generator

from compass_jax.apps.tinker.errors import RequestError
from compass_jax.base.aliases import JsonObject
from compass_jax.base.errors import CompassError

Answer = JsonObject | bytes | CompassError  # JSON, a message of protobuf, or an error
Steps = Generator[None, None, Answer]  # of a job: it yields between micro-batches
ANSWER_BYTES = 2**28  # of all answers that are kept
WAIT_S = 20.0  # how long a client's call waits for an answer


class Answers:
    """The answers of the last `count` requests, up to ANSWER_BYTES. All methods belong to the event
    loop.
    """

    def __init__(self, count: int):
        self._count = count
        self._futures: OrderedDict[str, asyncio.Future[Answer]] = OrderedDict()

    def __contains__(self, request: str) -> bool:
        return request in self._futures

    def open(self, request: str) -> Callable[[Answer], None]:
        """Returns a function that takes the answer to a request, from any thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._futures[request] = future
        self._drop_oldest()

        def put(answer: Answer) -> None:
            def set_result() -> None:
                if not future.done():
                    future.set_result(answer)

            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(set_result)

        return put

    def forget(self, request: str) -> None:
        """Removes a request that was not accepted."""
        self._futures.pop(request, None)

    async def wait(self, request: str, timeout_s: float = WAIT_S) -> Answer | None:
        """Returns the answer to a request; None if it takes longer than `timeout_s`. Raises
        RequestError for a request that is not known: 410 tells the client to send it again.
        """
        future = self._futures.get(request)
        if future is None:
            text = f"no request {request[:100]!r} is known: the server was started again, or its"
            raise RequestError(f"{text} answer was dropped", status=410)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(future), timeout_s)
        return None

    def _drop_oldest(self) -> None:
        """Drops the oldest answers beyond the limits; unanswered requests stay."""
        answered = {key: x.result() for key, x in self._futures.items() if x.done()}
        sizes = {key: len(x) if isinstance(x, bytes) else 0 for key, x in answered.items()}
        total, extra = sum(sizes.values()), len(self._futures) - self._count
        for request in answered:
            if extra <= 0 and total <= ANSWER_BYTES:
                return
            del self._futures[request]
            extra, total = extra - 1, total - sizes[request]


def public_answer(answer: Answer) -> JsonObject | bytes:
    """Returns the body of an answer: a message of protobuf, or JSON, of an error too."""
    if isinstance(answer, CompassError):
        status = getattr(answer, "status", 500)
        category = "user" if status < 500 else "server"
        return {"error": str(answer), "category": category}
    return answer
