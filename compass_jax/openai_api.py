"""`compass serve --openai`: /v1/completions, /v1/chat/completions and /v1/models over HTTP, as OpenAI's clients speak them.

An answer streams as server-sent events or comes whole. A client that goes away gives up its slots. Bodies are limited in size and waiting
requests in number; both limits answer at once (413, 429), nothing queues without bound.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from compass_jax import openai_requests as wire
from compass_jax.openai_requests import Asked, BadRequest, Served, TextStream
from compass_jax.rollout.online import Chunk, Full, OnlineBatcher, Request

BODY_BYTES = 1 << 20
LOOKED_FOR = 0.1  # seconds between two looks whether a client that waits for a whole answer is still there


class Piece(NamedTuple):
    """New text of one choice, the tokens that came with it, and why it ended ("" while it goes on)."""

    choice: int
    text: str
    tokens: list[int]
    logp: list[float]
    finish: str


class Answer:
    """All choices of one request, in the order in which their pieces come. `close` gives up what is not finished."""

    def __init__(self, asked: Asked, served: Served, batcher: OnlineBatcher, seed: int):
        self.asked, self._served = asked, served
        self._queue: asyncio.Queue[tuple[int, Chunk]] = asyncio.Queue()
        self._texts = [TextStream(served.tokenizer, asked.stop) for _ in range(len(asked.prompts) * asked.n)]
        self.completion_tokens = 0
        loop = asyncio.get_running_loop()

        def deliver(choice: int):
            return lambda chunk: loop.call_soon_threadsafe(self._queue.put_nowait, (choice, chunk))

        self._requests = [
            Request(tokens, asked.max_tokens, asked.temperature, deliver(p * asked.n + i), seed, p * asked.n + i)
            for p, tokens in enumerate(asked.prompts)
            for i in range(asked.n)
        ]
        batcher.submit(*self._requests)

    def close(self) -> None:
        """Cancels every request that has not ended."""
        for request in self._requests:
            request.cancel()

    def usage(self) -> dict[str, int]:
        """Tokens so far."""
        prompt = sum(len(tokens) for tokens in self.asked.prompts)
        return {"prompt_tokens": prompt, "completion_tokens": self.completion_tokens, "total_tokens": prompt + self.completion_tokens}

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces until every choice has ended. RuntimeError where the engine fails or the server stops."""
        open_choices = set(range(len(self._requests)))
        while open_choices:
            choice, chunk = await self._queue.get()
            if choice not in open_choices:
                continue  # what was decoded behind a stop text
            if chunk.finish in ("error", "cancelled"):
                raise RuntimeError("the engine has failed" if chunk.finish == "error" else "the server stops")
            self.completion_tokens += len(chunk.tokens)
            text = self._texts[choice].push(chunk.tokens, bool(chunk.finish))
            finish = "stop" if self._texts[choice].stopped else chunk.finish
            if finish:
                open_choices.discard(choice)
                self._requests[choice].cancel()
            shown = chunk.tokens[:-1] if chunk.finish == "stop" else chunk.tokens  # the end token is no text
            yield Piece(choice, text, shown, chunk.logp[: len(shown)], finish)


class Api:
    """The routes over one batcher."""

    def __init__(self, served: Served, batcher: OnlineBatcher):
        self.served, self.batcher = served, batcher
        self._number = itertools.count(1)
        self._started = int(time.time())

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
        ]
        return Starlette(routes=routes)

    async def models(self, request: HttpRequest) -> Response:
        """The one model."""
        model = {"id": self.served.model, "object": "model", "created": self._started, "owned_by": "compass_jax"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: HttpRequest) -> Response:
        """200 while the engine lives, 503 after it failed."""
        return JSONResponse({"status": "ok"} if self.batcher.error is None else {"status": "failed"}, 200 if self.batcher.error is None else 503)

    async def completions(self, request: HttpRequest) -> Response:
        """POST /v1/completions."""
        return await self._respond(request, chat=False)

    async def chat(self, request: HttpRequest) -> Response:
        """POST /v1/chat/completions."""
        return await self._respond(request, chat=True)

    async def _respond(self, request: HttpRequest, chat: bool) -> Response:
        number = next(self._number)
        try:
            body = await _body(request)
            asked = (wire.chat if chat else wire.completion)(body, self.served)
            answer = Answer(asked, self.served, self.batcher, number if asked.seed is None else asked.seed)
        except BadRequest as error:
            return _error(str(error), error.status, error.param)
        except ValueError as error:
            return _error(str(error), 400, None)
        except Full as error:
            return _error(str(error), 429, None)
        except RuntimeError as error:
            return _error(str(error), 500, None)
        form = _Form(self.served, chat, asked, number)
        if asked.stream:
            return StreamingResponse(_events(answer, form), media_type="text/event-stream")
        return await _whole(request, answer, form)


class _Form(NamedTuple):
    """How an answer is written."""

    served: Served
    chat: bool
    asked: Asked
    number: int

    def envelope(self, streamed: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.chat else "text_completion"
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.served.model}

    def logprobs(self, tokens: list[int], logp: list[float], offset: int) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        texts = [self.served.tokenizer.decode([t]) for t in tokens]
        if self.chat:
            rows = zip(texts, logp, strict=True)
            return {"content": [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in rows]}
        starts = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
        return {"tokens": texts, "token_logprobs": logp, "top_logprobs": None, "text_offset": starts}

    def choice(self, index: int, text: str, tokens: list[int], logp: list[float], finish: str, streamed: bool, offset: int = 0) -> dict[str, Any]:
        head = {"index": index, "finish_reason": finish or None, "logprobs": self.logprobs(tokens, logp, offset)}
        if not self.chat:
            return {**head, "text": text}
        return {**head, ("delta" if streamed else "message"): {"role": "assistant", "content": text}}


async def _events(answer: Answer, form: _Form) -> AsyncIterator[str]:
    """Server-sent events, one for each piece; also where the client leaves, the slots are given up."""
    offsets: dict[int, int] = {}
    try:
        async for piece in answer.pieces():
            offset = offsets.get(piece.choice, 0)
            offsets[piece.choice] = offset + len(piece.text)
            choice = form.choice(piece.choice, piece.text, piece.tokens, piece.logp, piece.finish, True, offset)
            yield f"data: {json.dumps({**form.envelope(True), 'choices': [choice]})}\n\n"
        if form.asked.usage:
            yield f"data: {json.dumps({**form.envelope(True), 'choices': [], 'usage': answer.usage()})}\n\n"
        yield "data: [DONE]\n\n"
    except RuntimeError as error:
        yield f"data: {json.dumps({'error': {'message': str(error), 'type': 'server_error'}})}\n\n"
    finally:
        answer.close()


async def _whole(request: HttpRequest, answer: Answer, form: _Form) -> Response:
    """The answer when all of it is there; given up when the client leaves before."""

    async def gather() -> list[list[Piece]]:
        found: list[list[Piece]] = [[] for _ in range(len(form.asked.prompts) * form.asked.n)]
        async for piece in answer.pieces():
            found[piece.choice].append(piece)
        return found

    task = asyncio.create_task(gather())
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=LOOKED_FOR)
            if not task.done() and await request.is_disconnected():
                return Response(status_code=499)
        choices = []
        for index, pieces in enumerate(task.result()):
            tokens, logp = ([x for piece in pieces for x in getattr(piece, name)] for name in ("tokens", "logp"))
            choices.append(form.choice(index, "".join(p.text for p in pieces), tokens, logp, pieces[-1].finish, False))
        return JSONResponse({**form.envelope(False), "choices": choices, "usage": answer.usage()})
    except RuntimeError as error:
        return _error(str(error), 500, None)
    finally:
        task.cancel()
        answer.close()


async def _body(request: HttpRequest) -> Any:
    """The JSON body. BadRequest where it is none, or larger than BODY_BYTES, whatever its headers say."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > BODY_BYTES:
                raise BadRequest(f"the body exceeds {BODY_BYTES} bytes", status=413)
            parts.append(part)
    except ClientDisconnect as error:
        raise BadRequest("the client left") from error
    try:
        return json.loads(b"".join(parts))
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def _error(message: str, status: int, param: str | None) -> Response:
    kind = "invalid_request_error" if status < 429 else "rate_limit_error" if status == 429 else "server_error"
    headers = {"retry-after": "1"} if status == 429 else None
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": None}}, status, headers=headers)
