"""The route /inference/v1/generate: token ids in, token ids and their log-probs out, on the wire of
vLLM, which the training clients of verifiers and renderers speak.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator

from compass_jax.base.aliases import JsonObject
from compass_jax.rollout.online import Chunk, OnlineBatcher, Streamed
from compass_jax.rollout.serving import metrics
from compass_jax.rollout.serving.errors import ApiError
from compass_jax.rollout.serving.openai_requests import GenerateJob, Served


class Generation:
    """The response to one request, which ends with an end token of the model, with one of the
    request's `stop_token_ids`, or at its limit. The last token is part of it.

    Log-probs are those of the distribution that is sampled: at the request's temperature, before
    top-k and top-p; at temperature 0 those of temperature 1.
    """

    streams = False  # the answer is one JSON body

    def __init__(self, job: GenerateJob, served: Served, batcher: OnlineBatcher, number: int):
        self._job, self._batcher, self._number = job, batcher, number
        self._model = served.model
        self._queue: asyncio.Queue[Chunk] = asyncio.Queue()
        loop, params = asyncio.get_running_loop(), job.body.sampling_params

        def deliver(chunk: Chunk) -> None:
            """Hands a chunk from the batcher's thread to the event loop."""
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._queue.put_nowait, chunk)

        self._request = Streamed.of_client(
            job.prompt,
            job.max_tokens,
            params.temperature,
            deliver,
            top_k=min(max(params.top_k, 0), served.vocab_size),
            top_p=params.top_p,
            # other draws after a restart, and in another server
            seed=secrets.randbits(32) if params.seed is None else params.seed,
        )
        batcher.submit([self._request])
        metrics.PROMPT_TOKENS.inc(len(job.prompt))

    def close(self) -> None:
        """Cancels the request unless it is finished."""
        self._batcher.cancel([self._request])

    async def body(self) -> AsyncIterator[bytes]:
        """Yields the JSON of the complete answer, once. Raises ApiError with status 500 if the
        engine fails, and with 503 if the server stops.
        """
        ids: list[int] = []
        ends, finish = {*self._job.body.sampling_params.stop_token_ids}, ""
        while not finish:
            chunk = await self._queue.get()
            if chunk.finish == "error":
                raise ApiError("the engine has failed", status=500)
            if chunk.finish == "cancelled":
                raise ApiError("the server stops", status=503)
            finish = chunk.finish
            for token in chunk.tokens:
                ids.append(token)
                if token in ends:
                    finish = "stop"
                    break
        self.close()
        metrics.COMPLETION_TOKENS.inc(len(ids))
        yield json.dumps(self._answer(ids, finish)).encode()

    def _answer(self, ids: list[int], finish: str) -> JsonObject:
        first = len(self._job.prompt)
        logp = self._request.logp[first : first + len(ids)].tolist()
        return answer_body(f"{self._number}", self._model, first, ids, logp, finish)


def answer_body(
    number: str, model: str, prompt: int, ids: list[int], logp: list[float], finish: str
) -> JsonObject:
    """Returns the body of a reply to a request of `prompt` tokens."""
    content = [
        {"token": f"token_id:{token}", "logprob": value}
        for token, value in zip(ids, logp, strict=True)
    ]
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}}
    usage = {"prompt_tokens": prompt, "completion_tokens": len(ids)}
    return {
        "request_id": f"generate-{number}",
        "model": model,
        "choices": [{**choice, "finish_reason": finish}],
        "usage": {**usage, "total_tokens": prompt + len(ids)},
    }
