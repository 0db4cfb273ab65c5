"""`compass serve`: the routes of OpenAI's API and vLLM's route of token ids, over one batcher.

A response is streamed as server-sent events or sent as one JSON body. The slots of a client that
disconnects are released. Bodies are parsed and tokenised in threads, so that a long body does not
block the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from compass_jax.rollout.online import OnlineBatcher, QueueFull
from compass_jax.rollout.serving import metrics
from compass_jax.rollout.serving.errors import ApiError
from compass_jax.rollout.serving.generate import Generation
from compass_jax.rollout.serving.guard import CLIENT_LEFT, Guard, error_response
from compass_jax.rollout.serving.limits import Limits
from compass_jax.rollout.serving.openai_answers import Answer
from compass_jax.rollout.serving.openai_bodies import ChatBody, CompletionBody
from compass_jax.rollout.serving.openai_requests import Served, read_generate, read_job

T = TypeVar("T")
Kind = type[CompletionBody | ChatBody]


class Api:
    """The routes, and the state that their requests share."""

    def __init__(self, served: Served, batcher: OnlineBatcher, limits: Limits):
        self.served = served
        self.batcher = batcher
        self.limits = limits
        self._preparing = 0
        self._reading = CapacityLimiter(2)  # threads that parse and tokenise
        self._number = itertools.count(secrets.randbits(48))  # ids differ after a restart
        self._started = int(time.time())
        metrics.PREPARING.set_function(lambda: self._preparing)
        metrics.SLOTS.set(batcher.engine.config.slots)
        metrics.SLOTS_USED.set_function(lambda: batcher.active)
        metrics.WAITING.set_function(lambda: batcher.waiting)
        self.routes = [
            Route("/v1/completions", partial(self.respond, kind=CompletionBody), methods=["POST"]),
            Route("/v1/chat/completions", partial(self.respond, kind=ChatBody), methods=["POST"]),
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics_page),
        ]

    async def models(self, request: Request) -> Response:
        """Returns the list of models, which has one entry."""
        served = self.served
        model = {"id": served.model, "object": "model", "created": self._started}
        model["max_model_len"] = served.prompt_tokens + served.max_new_tokens
        return JSONResponse({"object": "list", "data": [{**model, "owned_by": "compass_jax"}]})

    async def health(self, request: Request) -> Response:
        """Returns 200 while the engine runs, 503 after it failed."""
        if self.batcher.error is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed"}, 503)

    async def metrics_page(self, request: Request) -> Response:
        """Returns the metrics in Prometheus's text format."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def respond(self, request: Request, kind: Kind) -> Response:
        """Returns the response to a completion or chat request."""
        job = await self._job(request, partial(read_job, kind=kind, served=self.served))
        began = request.scope["began"]
        return self._submitted(lambda n: Answer(job, self.served, self.batcher, n, began))

    async def generate(self, request: Request) -> Response:
        """Returns the response to a request of token ids."""
        job = await self._job(request, partial(read_generate, served=self.served))
        return self._submitted(lambda n: Generation(job, self.served, self.batcher, n))

    async def _job(self, request: Request, read: Callable[[bytes], T]) -> T:
        """Receives, parses and tokenises a request."""
        limits = self.limits
        if self._preparing >= limits.preparing:
            text = f"{self._preparing} requests are being prepared: try again later"
            raise ApiError(text, status=429)
        self._preparing += 1
        try:
            body = await read_request(request, limits)
            return await to_thread.run_sync(read, body, limiter=self._reading)
        finally:
            self._preparing -= 1

    def _submitted(self, submit: Callable[[int], Answer | Generation]) -> Response:
        """Returns the response to a job that `submit` puts into the queue, by its number."""
        try:
            return AnswerResponse(submit(next(self._number)))
        except QueueFull as error:
            raise ApiError(str(error), status=429) from error
        except ValueError as error:
            raise ApiError(str(error)) from error
        except RuntimeError as error:
            status = 503 if self.batcher.error is None else 500
            raise ApiError(str(error), status=status) from error


class AnswerResponse(StreamingResponse):
    """A JSON response or a stream of events, cancelled when the client disconnects."""

    def __init__(self, answer: Answer | Generation):
        self._answer, self._streams = answer, answer.streams
        media_type = "text/event-stream" if self._streams else "application/json"
        super().__init__(
            answer.body(), headers={"cache-control": "no-cache"}, media_type=media_type
        )

    async def stream_response(self, send: Send) -> None:
        """Sends the response. Waits for the first part before it sends the status, so that an
        earlier error has its proper status.
        """
        parts = aiter(self.body_iterator)
        body = await anext(parts)
        if not self._streams:
            self.headers["content-length"] = str(len(body))
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while body:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            body = await anext(parts, b"")
        await send({"type": "http.response.body", "body": b""})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response, then cancels any unfinished requests."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


def make_app(
    served: Served,
    batcher: OnlineBatcher,
    limits: Limits,
    hosts: Sequence[str] = (),
    key: str | None = None,
) -> Guard:
    """Returns the application. Clients may use the names in `hosts`, and must send `key`."""
    api = Api(served, batcher, limits)
    kinds = (ApiError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=api.routes, exception_handlers={kind: on_error for kind in kinds})
    app.router.redirect_slashes = False
    return Guard(app, [route.path for route in api.routes], hosts, key)


async def on_error(request: Request, error: Exception) -> Response:
    """Returns the response to a request that raised an exception."""
    if isinstance(error, ApiError):
        return error_response(error)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)
    if not isinstance(error, HTTPException):
        return error_response(ApiError("the server has failed", status=500))
    path, headers = request.url.path[:100], dict(error.headers or {})
    text = f"there is no {path!r} here"
    if error.status_code == 405:
        text = f"{path} takes {headers.get('Allow')}"
    return error_response(ApiError(text, status=error.status_code, headers=headers))


async def read_request(request: Request, limits: Limits) -> bytes:
    """Returns the body of a request. Raises ApiError for one that is too large or too slow."""
    try:
        async with asyncio.timeout(limits.prepare_s):
            return await _body(request, limits.body_bytes)
    except TimeoutError as error:
        text = f"the request did not come within {limits.prepare_s:g} s"
        raise ApiError(text, status=408) from error


async def _body(request: Request, most: int) -> bytes:
    """Returns the body of a request. Raises ApiError if it has more than `most` bytes."""
    size = int(request.headers.get("content-length", "0"))
    body = bytearray()
    if size <= most:
        async for part in request.stream():
            body += part
            if (size := len(body)) > most:
                break
    if size > most:
        raise ApiError(f"the body exceeds {most} bytes", status=413)
    return bytes(body)
