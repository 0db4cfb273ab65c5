"""`compass serve --openai`: /v1/completions, /v1/chat/completions and /v1/models over HTTP, as
OpenAI's clients speak them.

An answer streams as server-sent events or comes whole. A client that goes away gives up its slots.
The event loop moves bytes alone: bodies are parsed and tokenised, tokens become text and answers
become JSON on threads of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from compass_jax.rollout.online import Full, OnlineBatcher
from compass_jax.serving import openai_requests as wire
from compass_jax.serving.errors import BadRequest
from compass_jax.serving.guard import Receive, Scope, Send
from compass_jax.serving.limits import Limits
from compass_jax.serving.metrics import CONTENT_TYPE, Metrics
from compass_jax.serving.openai_answers import Answer, Form, Piece
from compass_jax.serving.openai_logprobs import width
from compass_jax.serving.openai_requests import Asked, Served
from compass_jax.serving.places import Places, Writer


class Api:
    """An ASGI application: the routes over one batcher. Errors are raised as BadRequest."""

    def __init__(self, served: Served, batcher: OnlineBatcher, limits: Limits):
        self.served = served
        self.batcher = batcher
        self.limits = limits
        self.small = Places("requests", 2, limits.preparing, limits.prepare_s)
        self.large = Places(
            "large requests", 1, limits.large_bodies, limits.prepare_s, limits.large_rest
        )
        self.writer = Writer()
        self.metrics = Metrics()
        self._watch()
        self._receiving = 0  # large bodies
        self._number = itertools.count(1)
        self._started = int(time.time())
        self.routes = {
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics_page),
        }

    def close(self) -> None:
        """Ends the threads as soon as they have nothing to do."""
        for threads in (self.small, self.large, self.writer):
            threads.close()

    def _watch(self) -> None:
        watch = self.metrics.watch
        batcher = self.batcher
        watch(
            "compass_slots",
            "Sequences that are decoded together.",
            lambda: batcher.engine.config.slots,
        )
        watch("compass_slots_used", "Slots that hold a sequence.", lambda: batcher.active)
        watch("compass_waiting", "Sequences that wait for a slot.", lambda: batcher.waiting)
        watch(
            "compass_preparing",
            "Requests that are parsed and tokenised.",
            lambda: self.small.taken + self.large.taken,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        method, handler = self.routes.get(scope["path"], ("", None))
        if handler is None:
            raise BadRequest(f"there is no {scope['path'][:100]!r} here", status=404)
        if scope["method"] not in ((method, "HEAD") if method == "GET" else (method,)):
            raise BadRequest(
                f"{scope['path']} takes {method}",
                status=405,
                headers=((b"allow", method.encode()),),
            )
        await handler(scope, receive, send)

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = {
            "id": self.served.model,
            "object": "model",
            "created": self._started,
            "owned_by": "compass_jax",
        }
        await _send(send, json.dumps({"object": "list", "data": [model]}).encode())

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 while the engine lives, 503 after it failed."""
        alive = self.batcher.error is None
        await _send(
            send,
            json.dumps({"status": "ok" if alive else "failed"}).encode(),
            200 if alive else 503,
        )

    async def _metrics_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send(send, self.metrics.page().encode(), kind=CONTENT_TYPE)

    async def _completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._respond(scope, receive, send, chat=False)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._respond(scope, receive, send, chat=True)

    async def _respond(self, scope: Scope, receive: Receive, send: Send, chat: bool) -> None:
        number = next(self._number)
        asked = await self._asked(scope, receive, chat)
        try:
            seed = number if asked.seed is None else asked.seed
            answer = Answer(asked, self.served, self.batcher, self.writer, seed)
        except Full as error:
            self.metrics.rejected.add("queue")
            raise BadRequest(str(error), status=429) from error
        except ValueError as error:
            raise BadRequest(str(error)) from error
        except RuntimeError as error:
            raise BadRequest(
                str(error), status=503 if self.batcher.error is None else 500
            ) from error
        self.metrics.prompt_tokens.add(by=answer.usage()["prompt_tokens"])
        form = Form(self.served.model, chat, asked, number)
        try:
            pieces = self._timed(scope, answer)
            await _while_there(
                receive, (_stream if asked.stream else self._whole)(send, pieces, answer, form)
            )
        finally:
            answer.close()
            self.metrics.completion_tokens.add(by=answer.completion_tokens)

    async def _asked(self, scope: Scope, receive: Receive, chat: bool) -> Asked:
        """The request, received and prepared. Large bodies have few places, which they hold until
        they are prepared: they bound the memory that bodies take, and small requests wait for none
        of them."""
        limits = self.limits
        declared = int(dict(scope["headers"]).get(b"content-length", b"0"))
        large = declared > limits.small_body_bytes
        self._receiving += large
        body = bytearray()
        try:
            self._check_size(declared, large)
            async for part in _body(receive):
                body += part
                if not large and len(body) > limits.small_body_bytes:
                    large = True
                    self._receiving += 1
                self._check_size(len(body), large)
            places = self.large if large else self.small
            return await places.run(wire.read, bytes(body), chat, self.served)
        except BadRequest as error:
            reason = {413: "size", 429: "busy", 503: "busy", 499: "left"}.get(
                error.status, "request"
            )
            self.metrics.rejected.add(reason)
            raise
        finally:
            self._receiving -= large

    def _check_size(self, size: int, large: bool) -> None:
        if size > self.limits.body_bytes:
            raise BadRequest(f"the body exceeds {self.limits.body_bytes} bytes", status=413)
        if large and self._receiving > self.limits.large_bodies:
            text = f"{self.limits.large_bodies} large bodies are on their way: try again later"
            raise BadRequest(text, status=429)

    async def _timed(self, scope: Scope, answer: Answer) -> AsyncIterator[Piece]:
        first = True
        async for piece in answer.pieces():
            if first:
                self.metrics.first_token.observe(scope["path"], time.monotonic() - scope["begun"])
                first = False
            yield piece

    async def _whole(
        self, send: Send, pieces: AsyncIterator[Piece], answer: Answer, form: Form
    ) -> None:
        """Sends the answer when all of it is there."""
        found: list[list[Piece]] = [[] for _ in range(len(form.asked.prompts) * form.asked.n)]
        async for piece in pieces:
            found[piece.choice].append(piece)
        await _send(send, await self.writer.wait(form.whole, found, answer.usage()))


async def _stream(send: Send, pieces: AsyncIterator[Piece], answer: Answer, form: Form) -> None:
    """Sends server-sent events, one for each piece. An error is an event, too: its status has been
    sent by then."""

    async def event(value: Any) -> None:
        await send(
            {"type": "http.response.body", "body": b"data: %s\n\n" % value, "more_body": True}
        )
        await asyncio.sleep(0)  # others have their turn, and it is seen that the client left

    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    offsets: dict[int, int] = {}
    try:
        async for piece in pieces:
            offset = offsets.get(piece.choice, 0)
            offsets[piece.choice] = offset + width(piece.rows)
            choices = [form.choice(piece, True, offset)]
            await event(json.dumps({**form.envelope(True), "choices": choices}).encode())
        if form.asked.usage:
            last = {**form.envelope(True), "choices": [], "usage": answer.usage()}
            await event(json.dumps(last).encode())
        await event(b"[DONE]")
    except BadRequest as error:
        await event(error.body())
    await send({"type": "http.response.body", "body": b""})


async def _send(send: Send, body: bytes, status: int = 200, kind: str = "application/json") -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("the client left", status=499)
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def _while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work, or gives it up when the client leaves."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks: list[asyncio.Task[None]] = [asyncio.ensure_future(work), asyncio.ensure_future(left())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0] in done:
            await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
