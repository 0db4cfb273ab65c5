"""Responses of the HTTP server: converts tokens into pieces of text, and pieces into JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from anyio import to_thread

from compass_jax.base.aliases import Json, JsonObject, Tree
from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.rollout.online import Chunk, OnlineBatcher, Streamed
from compass_jax.rollout.serving import metrics
from compass_jax.rollout.serving.errors import ApiError
from compass_jax.rollout.serving.openai_logprobs import Logprobs, joined
from compass_jax.rollout.serving.openai_requests import Job, Served
from compass_jax.rollout.serving.openai_tools import AnswerStream
from compass_jax.rollout.serving.text import TextStream


class Piece(NamedTuple):
    """New text of one choice, with the log-probs and the number of its tokens.

    `thought` is new text of the thought. `finish` is the finish reason, "" before the end. The
    last piece holds tool `calls`; the first one `begins` the choice.
    """

    choice: int
    text: str
    logprobs: JsonObject | None
    tokens: int
    finish: str
    thought: str = ""
    calls: Sequence[JsonObject] = ()
    begins: bool = False


class Choice:
    """One choice of a job: converts its tokens into pieces."""

    def __init__(self, index: int, job: Job, served: Served):
        self.text = TextStream(served.tokenizer, job.body.stop)
        self._index = index
        self._one_by_one = bool(job.body.stop)
        self._logprobs = Logprobs(served.tokenizer, job.logprobs or 0, job.chat)
        self._stream: AnswerStream | None = None
        if job.chat:
            opened = served.tokenizer.opened_thought(job.prompts[index // job.body.n].tolist())
            self._stream = AnswerStream(served.tokenizer.chat_format, opened, job.tools)
        self._unknown_marks = served.unknown_marks
        self._echo = job.echo[index // job.body.n] if job.echo else ""
        self._begins = True

    def push(self, chunk: Chunk) -> Piece:
        """Returns the piece for new tokens."""
        begin, self._echo = self._echo, ""
        parts = [] if chunk.prompt is None else [self._logprobs.push(chunk.prompt, prompt=True)]
        text, count = self._push_text(chunk)
        if chunk.top is not None:
            parts.append(self._logprobs.push(TopLogprobs(*(x[:count] for x in chunk.top))))
        logprobs = joined(parts) if parts else None
        finish = "stop" if self.text.stopped else chunk.finish
        begins, self._begins = self._begins, False
        if self._stream is None:
            return Piece(self._index, begin + text, logprobs, count, finish, begins=begins)
        (thought, text, calls), message = self._stream.push(text, bool(finish))
        if message is not None:
            self._unknown_marks.warn(message.unknown_marks)
        finish = "tool_calls" if calls and finish == "stop" else finish
        return Piece(self._index, text, logprobs, count, finish, thought, calls, begins)

    def _push_text(self, chunk: Chunk) -> tuple[str, int]:
        """Returns the new text, and the number of tokens that it consumed. With stop strings,
        tokens are consumed one by one: the answer ends with the token that completes a stop string.
        """
        last = bool(chunk.finish)
        if not self._one_by_one or not chunk.tokens:
            return self.text.push(chunk.tokens, last), len(chunk.tokens)
        parts = []
        for count, token in enumerate(chunk.tokens, 1):
            parts.append(self.text.push([token], last and count == len(chunk.tokens)))
            if self.text.stopped:
                break
        return "".join(parts), count


class Answer:
    """The response to a job, as pieces in the order of arrival. `close` cancels the rest."""

    def __init__(self, job: Job, served: Served, batcher: OnlineBatcher, number: int, began: float):
        self.job, self.streams = job, job.body.stream
        self._served, self._batcher = served, batcher
        self._number, self._began = number, began
        # Other draws after a restart, and in another server
        self._seed = secrets.randbits(32) if job.body.seed is None else job.body.seed
        self._tokens = 0  # completion tokens of all choices so far
        self._queue: asyncio.Queue[tuple[int, Chunk]] = asyncio.Queue()
        n = job.body.n
        self._choices = [Choice(i, job, served) for i in range(len(job.prompts) * n)]
        groups = [
            [self._request(tokens, sample) for sample in range(p * n, (p + 1) * n)]
            for p, tokens in enumerate(job.prompts)
        ]
        self._requests = [request for group in groups for request in group]
        batcher.submit(*groups)
        metrics.PROMPT_TOKENS.inc(sum(map(len, job.prompts)))

    def _request(self, tokens: Tree, index: int) -> Streamed:
        job, body, loop = self.job, self.job.body, asyncio.get_running_loop()

        def deliver(chunk: Chunk) -> None:
            """Hands a chunk from the batcher's thread to the event loop."""
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._queue.put_nowait, (index, chunk))

        return Streamed.of_client(
            tokens,
            job.max_tokens,
            body.temperature,
            deliver,
            top_k=min(max(body.top_k, 0), self._served.vocab_size),
            top_p=body.top_p,
            seed=self._seed,
            sample=index,
            logprobs=job.logprobs is not None,
            of_prompt=bool(job.echo) and job.logprobs is not None,
        )

    def close(self) -> None:
        """Cancels every unfinished request."""
        self._batcher.cancel(self._requests)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields pieces until every choice has ended. Raises ApiError with status 500 if the engine
        fails, and with 503 if the server stops.
        """
        left, first = len(self._requests), True
        while left:
            index, chunk = await self._queue.get()
            choice = self._choices[index]
            if choice.text.stopped:
                continue  # decoded after a stop string
            if chunk.finish == "error":
                raise ApiError("the engine has failed", status=500)
            if chunk.finish == "cancelled":
                raise ApiError("the server stops", status=503)
            if first:
                route = "/v1/chat/completions" if self.job.chat else "/v1/completions"
                metrics.FIRST_TOKEN.labels(route).observe(time.monotonic() - self._began)
                first = False
            if chunk.prompt is None:
                piece = choice.push(chunk)
            else:  # slow for a long prompt
                piece = await to_thread.run_sync(choice.push, chunk)
            if choice.text.stopped:
                self._batcher.cancel([self._requests[index]])
            self._tokens += piece.tokens
            metrics.COMPLETION_TOKENS.inc(piece.tokens)
            left -= bool(piece.finish)
            yield piece

    def body(self) -> AsyncIterator[bytes]:
        """Returns the events of a stream, or the complete answer."""
        return self.events() if self.streams else self.single()

    async def single(self) -> AsyncIterator[bytes]:
        """Yields the JSON of the complete answer, once."""
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        async for piece in self.pieces():
            pieces[piece.choice].append(piece)
        yield await to_thread.run_sync(self._complete_body, pieces)

    def _complete_body(self, pieces: list[list[Piece]]) -> bytes:
        choices = []
        for parts in pieces:
            logprobs = [x.logprobs for x in parts if x.logprobs is not None]
            text = "".join(x.text for x in parts)
            piece = parts[-1]._replace(text=text, logprobs=joined(logprobs) if logprobs else None)
            piece = piece._replace(thought="".join(x.thought for x in parts))
            choices.append(choice_body(piece, self.job.chat, False))
        return self._json(choices, False, usage=self._usage())

    async def events(self) -> AsyncIterator[bytes]:
        """Yields server-sent events, one per piece. An error after the first event is sent as an
        event, because the status has been sent already.
        """
        started = False
        try:
            async for piece in self.pieces():
                started = True
                yield _event(self._json([choice_body(piece, self.job.chat, True)], True))
            options = self.job.body.stream_options
            if options and options.include_usage:
                yield _event(self._json([], True, usage=self._usage()))
            yield _event(b"[DONE]")
        except ApiError as error:
            if not started:
                raise
            yield _event(error.body())

    def _usage(self) -> dict[str, int]:
        return usage_body(sum(map(len, self.job.prompts)), self._tokens)

    def _json(self, choices: list[JsonObject], streamed: bool, **fields: Json) -> bytes:
        head = answer_head(self.job.chat, f"{self._number}", self._served.model, streamed)
        return json.dumps({**head, "choices": choices, **fields}).encode()


def answer_head(
    chat: bool, number: str, model: str, streamed: bool = False
) -> dict[str, str | int]:
    """Returns the fields of an answer that are not about its choices."""
    kind, name = "text_completion", "cmpl"
    if chat:
        kind, name = f"chat.completion{'.chunk' * streamed}", "chatcmpl"
    created = int(time.time())
    return {"id": f"{name}-{number}", "object": kind, "created": created, "model": model}


def usage_body(prompt: int, completion: int) -> dict[str, int]:
    """Returns the JSON of the numbers of tokens."""
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {**usage, "total_tokens": prompt + completion}


def choice_body(piece: Piece, chat: bool, streamed: bool = False) -> JsonObject:
    """Returns the JSON of one choice, for an event (`streamed`) or for a complete answer."""
    choice: JsonObject = {"index": piece.choice, "logprobs": piece.logprobs}
    choice["finish_reason"] = piece.finish or None
    if not chat:
        return {**choice, "text": piece.text}
    message: JsonObject = {"content": piece.text}
    if piece.begins or not streamed:
        message = {"role": "assistant", **message}
    if piece.thought:
        message["reasoning_content"] = piece.thought
    if piece.calls:
        message["content"] = piece.text or None
        message["tool_calls"] = [
            {"index": i, **call} if streamed else call for i, call in enumerate(piece.calls)
        ]
    return {**choice, ("delta" if streamed else "message"): message}


def _event(data: bytes) -> bytes:
    return b"data: %s\n\n" % data
