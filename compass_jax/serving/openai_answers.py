"""Answers of the HTTP server: tokens become pieces of text, and pieces become JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from anyio import CapacityLimiter, to_thread

from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.rollout.online import Chunk, OnlineBatcher, Streamed
from compass_jax.serving.errors import ApiError
from compass_jax.serving.openai_bodies import ChatBody
from compass_jax.serving.openai_logprobs import (
    Logprobs,
    Row,
    chat_logprobs,
    completion_logprobs,
    width,
)
from compass_jax.serving.openai_requests import Job, Served
from compass_jax.serving.openai_tools import CallStream
from compass_jax.serving.text import TextStream


class Piece(NamedTuple):
    """New text of one choice, the log-prob rows of the tokens that came with it, the number of
    these tokens, and why the choice ended ("" while it goes on). `calls` of tools come at the end.
    """

    choice: int
    text: str
    rows: list[Row]
    tokens: int
    finish: str
    calls: Sequence[dict[str, Any]] = ()


class Choice:
    """One of a job's choices: its tokens become pieces."""

    def __init__(self, index: int, job: Job, served: Served):
        self.text = TextStream(served.tokenizer, job.body.stop)
        self._index = index
        self._one_by_one = bool(job.body.stop)
        self._logprobs = Logprobs(served.tokenizer, job.logprobs or 0)
        self._calls = CallStream(job.tools) if job.tools else None
        self._echo = job.echo[index // job.body.n] if job.echo else ""

    def push(self, chunk: Chunk) -> Piece:
        """Returns the piece that new tokens make."""
        begin, self._echo = self._echo, ""
        rows = [] if chunk.prompt is None else self._logprobs.rows(chunk.prompt, prompt=True)
        text, taken = self._push_text(chunk)
        if chunk.top is not None:
            rows += self._logprobs.rows(TopLogprobs(*(x[:taken] for x in chunk.top)))
        finish = "stop" if self.text.stopped else chunk.finish
        calls: list[dict[str, Any]] = []
        if self._calls:
            text, calls = self._calls.push(text, bool(finish))
            finish = "tool_calls" if calls and finish == "stop" else finish
        return Piece(self._index, begin + text, rows, taken, finish, calls)

    def _push_text(self, chunk: Chunk) -> tuple[str, int]:
        """Returns the new text, and the number of the chunk's tokens that it took. With stop texts,
        tokens are taken one by one: the answer ends with the token that completes one.
        """
        last = bool(chunk.finish)
        if not self._one_by_one or not chunk.tokens:
            return self.text.push(chunk.tokens, last), len(chunk.tokens)
        parts = []
        for taken, token in enumerate(chunk.tokens, 1):
            parts.append(self.text.push([token], last and taken == len(chunk.tokens)))
            if self.text.stopped:
                break
        return "".join(parts), taken


class Answer:
    """All choices of a job, in the order in which their pieces come. `close` cancels what is not
    finished. Tokens become text in threads of `decoding`.
    """

    def __init__(
        self,
        job: Job,
        served: Served,
        batcher: OnlineBatcher,
        decoding: CapacityLimiter,
        number: int,
    ):
        self.job = job
        self.completion_tokens = 0
        self._model, self._number = served.model, number
        self._decoding = decoding
        self._batcher = batcher
        self._queue: asyncio.Queue[tuple[int, Chunk]] = asyncio.Queue()
        n = job.body.n
        self._choices = [Choice(i, job, served) for i in range(len(job.prompts) * n)]
        groups = [
            [self._request(tokens, sample) for sample in range(p * n, (p + 1) * n)]
            for p, tokens in enumerate(job.prompts)
        ]
        self._requests = [request for group in groups for request in group]
        batcher.submit(*groups)

    def _request(self, tokens: Any, index: int) -> Streamed:
        body = self.job.body
        return Streamed.asked(
            tokens,
            self.job.max_tokens,
            body.temperature,
            self._deliver(index),
            top_k=self.job.top_k,
            top_p=body.top_p,
            seed=self._number if body.seed is None else body.seed,
            sample=index,
            logprobs=self.job.logprobs is not None,
            of_prompt=bool(self.job.echo) and self.job.logprobs is not None,
        )

    def _deliver(self, index: int) -> Callable[[Chunk], None]:
        """Returns what the batcher's thread calls with each chunk of a choice."""
        loop = asyncio.get_running_loop()

        def deliver(chunk: Chunk) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._queue.put_nowait, (index, chunk))

        return deliver

    def close(self) -> None:
        """Cancels every request that has not ended."""
        self._batcher.cancel(self._requests)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields pieces until every choice has ended. ApiError (500, 503) if the engine fails or
        the server stops.
        """
        left = len(self._requests)
        while left:
            index, chunk = await self._queue.get()
            choice = self._choices[index]
            if choice.text.stopped:
                continue  # decoded after a stop text
            if chunk.finish == "error":
                raise ApiError("the engine has failed", status=500)
            if chunk.finish == "cancelled":
                raise ApiError("the server stops", status=503)
            piece = await to_thread.run_sync(choice.push, chunk, limiter=self._decoding)
            if choice.text.stopped:
                self._batcher.cancel([self._requests[index]])
            self.completion_tokens += piece.tokens
            left -= bool(piece.finish)
            yield piece

    def usage(self) -> dict[str, int]:
        """Returns the numbers of tokens so far."""
        prompt, completion = sum(map(len, self.job.prompts)), self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    async def whole(self, pieces: AsyncIterator[Piece]) -> bytes:
        """Returns the JSON of the answer, when all of it is there."""
        found: list[list[Piece]] = [[] for _ in self._choices]
        async for piece in pieces:
            found[piece.choice].append(piece)
        return await to_thread.run_sync(self._whole, found, limiter=self._decoding)

    def _whole(self, found: list[list[Piece]]) -> bytes:
        choices = []
        for index, pieces in enumerate(found):
            rows = [row for piece in pieces for row in piece.rows]
            text = "".join(piece.text for piece in pieces)
            last = pieces[-1]
            whole = Piece(index, text, rows, 0, last.finish, last.calls)
            choices.append(self._choice(whole, False))
        return self._json(choices, False, usage=self.usage())

    async def events(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        """Yields server-sent events, one for each piece. An error is an event, too: the status has
        been sent by then.
        """
        offsets = [0] * len(self._choices)  # characters of each choice's text so far
        try:
            async for piece in pieces:
                choice = self._choice(piece, True, offsets[piece.choice])
                offsets[piece.choice] += width(piece.rows)
                yield _event(self._json([choice], True))
            if self.job.usage:
                yield _event(self._json([], True, usage=self.usage()))
            yield _event(b"[DONE]")
        except ApiError as error:
            yield _event(error.body())

    def _json(self, choices: list[dict[str, Any]], streamed: bool, **others: Any) -> bytes:
        kind, name = "text_completion", "cmpl"
        if isinstance(self.job.body, ChatBody):
            kind, name = f"chat.completion{'.chunk' * streamed}", "chatcmpl"
        head = {"id": f"{name}-{self._number}", "object": kind, "created": int(time.time())}
        return json.dumps({**head, "model": self._model, "choices": choices, **others}).encode()

    def _choice(self, piece: Piece, streamed: bool, offset: int = 0) -> dict[str, Any]:
        """Returns one choice of an event (`streamed`) or of a whole answer. `offset`: characters of
        its text before the piece.
        """
        chat, most = isinstance(self.job.body, ChatBody), self.job.logprobs
        logprobs = None
        if most is not None:
            rows = piece.rows
            logprobs = chat_logprobs(rows) if chat else completion_logprobs(rows, offset, most)
        head = {"index": piece.choice, "finish_reason": piece.finish or None, "logprobs": logprobs}
        if not chat:
            return {**head, "text": piece.text}
        message: dict[str, Any] = {"role": "assistant", "content": piece.text}
        if piece.calls:
            message["content"] = piece.text or None
            message["tool_calls"] = [
                {"index": i, **call} if streamed else call for i, call in enumerate(piece.calls)
            ]
        return {**head, ("delta" if streamed else "message"): message}


def _event(data: bytes) -> bytes:
    return b"data: %s\n\n" % data
