"""Answers of the HTTP server: tokens become pieces of text, and pieces become JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.rollout.online import Chunk, OnlineBatcher, Streamed
from compass_jax.serving.errors import BadRequest
from compass_jax.serving.openai_logprobs import Logprobs, Row, chat_logprobs, completion_logprobs
from compass_jax.serving.openai_requests import Asked, Served
from compass_jax.serving.openai_tools import CallStream
from compass_jax.serving.places import Writer
from compass_jax.serving.text import TextStream


class Piece(NamedTuple):
    """New text of one choice, the rows of the tokens that came with it (where log-probs are asked
    for), their number, and why it ended ("" while it goes on; "error" and "cancelled" end the
    whole request)."""

    choice: int
    text: str
    rows: list[Row]
    tokens: int
    finish: str
    calls: Sequence[dict[str, Any]] = ()  # of tools, at the end


class Answer:
    """All choices of one request, in the order in which their pieces come. `close` gives up what is
    not finished."""

    def __init__(
        self, asked: Asked, served: Served, batcher: OnlineBatcher, writer: Writer, seed: int
    ):
        self.asked = asked
        self.completion_tokens = 0
        self._logprobs = Logprobs(served.tokenizer, asked.logprobs or 0)
        # of each choice that has not begun
        self._echo = {
            choice: text
            for choice, text in enumerate(text for text in asked.echo for _ in range(asked.n))
        }
        self._queue: asyncio.Queue[Piece] = asyncio.Queue()
        self._texts = [
            TextStream(served.tokenizer, asked.stop) for _ in range(len(asked.prompts) * asked.n)
        ]
        self._calls = [CallStream(asked.tools) for _ in self._texts if asked.tools]
        loop = asyncio.get_running_loop()

        def deliver(choice: int) -> Callable[[Chunk], None]:
            # From the batcher's thread to the writer's, and from there to the event loop.
            return lambda chunk: writer.run(
                loop, self._queue.put_nowait, self._piece, choice, chunk
            )

        groups = [
            [
                Streamed.asked(
                    tokens,
                    asked.max_tokens,
                    asked.temperature,
                    deliver(sample),
                    top_k=asked.top_k,
                    top_p=asked.top_p,
                    seed=seed,
                    sample=sample,
                    logprobs=asked.logprobs is not None,
                    of_prompt=bool(asked.echo) and asked.logprobs is not None,
                )
                for sample in range(p * asked.n, (p + 1) * asked.n)
            ]
            for p, tokens in enumerate(asked.prompts)
        ]
        self._batcher = batcher
        self._requests = [request for group in groups for request in group]
        batcher.submit(*groups)

    def close(self) -> None:
        """Cancels every request that has not ended."""
        self._batcher.cancel(self._requests)

    def usage(self) -> dict[str, int]:
        """Tokens so far."""
        prompt = sum(len(tokens) for tokens in self.asked.prompts)
        total = prompt + self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }

    def _piece(self, choice: int, chunk: Chunk) -> Piece | None:
        """The piece that new tokens make, in the writer's thread; None for what was decoded after a
        stop text."""
        stream = self._texts[choice]
        if stream.stopped:
            return None
        if chunk.finish in ("error", "cancelled"):
            return Piece(choice, "", [], 0, chunk.finish)
        try:
            begin = self._echo.pop(choice, "")
            rows = [] if chunk.prompt is None else self._logprobs.rows(chunk.prompt, prompt=True)
            text, taken = self._text(stream, chunk)
            if chunk.top is not None:
                rows += self._logprobs.rows(TopLogprobs(*(x[:taken] for x in chunk.top)))
        except Exception:
            logging.getLogger(__name__).exception("the tokenizer cannot decode")
            return Piece(choice, "", [], 0, "error")
        if stream.stopped:
            self._batcher.cancel([self._requests[choice]])
        finish = "stop" if stream.stopped else chunk.finish
        calls: list[dict[str, Any]] = []
        if self._calls:
            text, calls = self._calls[choice].push(text, bool(finish))
            finish = "tool_calls" if calls and finish == "stop" else finish
        return Piece(choice, begin + text, rows, taken, finish, calls)

    def _text(self, stream: TextStream, chunk: Chunk) -> tuple[str, int]:
        """(new text, tokens of the chunk that it took). Where there are stop texts, tokens are
        taken one by one: the answer ends with the token that completes one, however many come
        together."""
        last = bool(chunk.finish)
        if not self.asked.stop:
            return stream.push(chunk.tokens, last), len(chunk.tokens)
        parts = [stream.push([], last)] if not chunk.tokens else []
        for taken, token in enumerate(chunk.tokens, 1):
            parts.append(stream.push([token], last and taken == len(chunk.tokens)))
            if stream.stopped:
                return "".join(parts), taken
        return "".join(parts), len(chunk.tokens)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces until every choice has ended. BadRequest (500, 503) where the engine fails or the
        server stops."""
        left = len(self._requests)
        while left:
            piece = await self._queue.get()
            if piece.finish == "error":
                raise BadRequest("the engine has failed", status=500)
            if piece.finish == "cancelled":
                raise BadRequest("the server stops", status=503)
            self.completion_tokens += piece.tokens
            left -= bool(piece.finish)
            yield piece


class Form(NamedTuple):
    """How an answer is written."""

    model: str
    chat: bool
    asked: Asked
    number: int

    def envelope(self, streamed: bool) -> dict[str, Any]:
        """What every event and every whole answer begins with."""
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if streamed else "chat.completion"
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.model}

    def logprobs(self, rows: list[Row], offset: int) -> dict[str, Any] | None:
        """Those of a choice's tokens; `offset`: characters of the text before them."""
        if self.asked.logprobs is None:
            return None
        if self.chat:
            return chat_logprobs(rows)
        return completion_logprobs(rows, offset, self.asked.logprobs)

    def choice(self, piece: Piece, streamed: bool, offset: int = 0) -> dict[str, Any]:
        """One choice of an event (`streamed`) or of a whole answer."""
        logprobs = self.logprobs(piece.rows, offset)
        head = {"index": piece.choice, "finish_reason": piece.finish or None, "logprobs": logprobs}
        if not self.chat:
            return {**head, "text": piece.text}
        message: dict[str, Any] = {"role": "assistant", "content": piece.text}
        if piece.calls:
            message["content"] = piece.text or None
            message["tool_calls"] = [
                {"index": i, **call} if streamed else call for i, call in enumerate(piece.calls)
            ]
        return {**head, ("delta" if streamed else "message"): message}

    def whole(self, found: list[list[Piece]], usage: dict[str, int]) -> bytes:
        """The JSON of a whole answer."""
        choices = []
        for index, pieces in enumerate(found):
            rows = [row for piece in pieces for row in piece.rows]
            text = "".join(piece.text for piece in pieces)
            last = pieces[-1]
            whole = Piece(index, text, rows, 0, last.finish, last.calls)
            choices.append(self.choice(whole, False))
        return json.dumps({**self.envelope(False), "choices": choices, "usage": usage}).encode()
