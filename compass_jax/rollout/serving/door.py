"""The door of a training run: its engine on the routes /inference/v1/generate and
/v1/chat/completions (door_chat.py), for the drivers of episodes.

It listens on loopback alone. A session's address has a secret token, so that no session can name
another's: http://127.0.0.1:PORT/s/TOKEN, with the routes of `compass serve` under it. A client that
sends the token in the header X-Session-ID may leave the path out; with the path, the header names
the agent of the episode that asks, as verifiers does.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from compass_jax.base.errors import CompassError
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rollout.ask import Ask, Left, Reply
from compass_jax.rollout.serving.door_chat import Conversations
from compass_jax.rollout.serving.errors import ApiError
from compass_jax.rollout.serving.generate import answer_body
from compass_jax.rollout.serving.guard import Guard
from compass_jax.rollout.serving.limits import Limits, bind, raise_descriptors
from compass_jax.rollout.serving.openai_api import on_error, read_request
from compass_jax.rollout.serving.openai_requests import Served, read_generate
from compass_jax.rollout.serving.server import http_server

MODEL = "policy"  # the name of the model, which requests may leave out
HEADER = "x-session-id"
MOST_AGENT = 200  # characters of an agent's name
STOP_S = 10.0  # time for the server's thread to end
WATCH_S = 0.5  # between looks for a client that has left, and for the end of the episode
# the settings of the most tokens of a sequence
LENGTH = "rollout.prompt_buckets[-1] + rollout.max_new_tokens"
# A turn holds its connection until it is sampled: there may be as many as samples of a step.
LIMITS = Limits(connections=2**14, body_bytes=2**24, stop_s=1.0)


class TrainingDoor:
    """The server, which runs in a thread.

    Args:
        tokenizer: of the policy.
        most_tokens: of a sequence, prompt and reply.
        put: takes the requests.
        is_open: whether a session with this token is played now.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        most_tokens: int,
        put: Callable[[Ask | Left], None],
        is_open: Callable[[str], bool],
    ):
        vocabulary = tokenizer.vocab_size
        limits = most_tokens, most_tokens
        self._served = Served(MODEL, tokenizer, vocabulary, *limits, limit=LENGTH)
        self._most, self._put, self._is_open = most_tokens, put, is_open
        self._conversations = Conversations(self._served, is_open)
        self._started = int(time.time())
        routes = []
        for prefix in ("", "/s/{session}"):
            routes += [
                Route(f"{prefix}/inference/v1/generate", self._generate, methods=["POST"]),
                Route(f"{prefix}/v1/chat/completions", self._chat, methods=["POST"]),
                Route(f"{prefix}/v1/models", self._models),
            ]
        kinds = (ApiError, HTTPException, ClientDisconnect, Exception)
        app = Starlette(routes=routes, exception_handlers={kind: on_error for kind in kinds})
        raise_descriptors()
        self._socket = bind("127.0.0.1", 0)
        self._port = self._socket.getsockname()[1]
        self._server = http_server(Guard(app, [], [], None), LIMITS)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="door", daemon=True
        )
        self._thread.start()

    def url(self, session: str) -> str:
        """Returns the address of a session, under which its routes are."""
        return f"http://127.0.0.1:{self._port}/s/{session}"

    def close(self) -> None:
        """Ends the server."""
        self._server.should_exit = True
        self._thread.join(STOP_S)
        self._socket.close()

    async def _models(self, request: Request) -> Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": self._started}
        model |= {"max_model_len": self._most, "owned_by": "compass_jax"}
        return JSONResponse({"object": "list", "data": [model]})

    def _session(self, request: Request) -> str:
        """Returns the token of a request's session. Raises ApiError for one that is not open."""
        token = request.path_params.get("session") or request.headers.get(HEADER, "")
        if not self._is_open(token):
            raise ApiError("no episode with this session is played now", status=404)
        return token

    def _agent(self, request: Request) -> str:
        """Returns the agent that the header names if the path has the session's token."""
        in_path = "session" in request.path_params
        return request.headers.get(HEADER, "")[:MOST_AGENT] if in_path else ""

    async def _generate(self, request: Request) -> Response:
        session = self._session(request)
        job = read_generate(await read_request(request, LIMITS), self._served)
        params = job.body.sampling_params
        if params.seed is not None:
            raise ApiError("leave the seed out: an episode's draws are its own", "seed")
        sampling = params.model_dump(include={"temperature", "top_p", "top_k"}, exclude_unset=True)
        stops = tuple(params.stop_token_ids)
        reply = await self._sampled(
            request, session, np.asarray(job.prompt), job.max_tokens, sampling, stops
        )
        ids, logp = reply.tokens.tolist(), reply.logp.tolist()
        finish = "stop" if reply.stopped else "length"
        prompt = len(job.prompt)
        return JSONResponse(answer_body(session[:8], MODEL, prompt, ids, logp, finish))

    async def _chat(self, request: Request) -> Response:
        session = self._session(request)
        data = await read_request(request, LIMITS)
        turn = await self._conversations.read(data, session, self._agent(request))
        (prompt,) = turn.job.prompts
        reply = await self._sampled(request, session, prompt, turn.job.max_tokens, turn.sampling)
        return JSONResponse(await self._conversations.answer(turn, reply))

    async def _sampled(
        self,
        request: Request,
        session: str,
        prompt: np.ndarray,
        limit: int,
        sampling: dict[str, float],
        stops: tuple[int, ...] = (),
    ) -> Reply:
        """Returns the turn that the engine samples after a prompt. Raises ApiError for a request
        that the episode does not allow, and ClientDisconnect if its client leaves.
        """
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def deliver(answer: Reply | CompassError) -> None:
            """Hands the answer from the trainer's thread to the event loop."""

            def set_result() -> None:
                if not future.done():
                    future.set_result(answer)

            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(set_result)

        ask = Ask(session, prompt, limit, sampling, stops, deliver, self._agent(request))
        self._put(ask)
        while not (await asyncio.wait([future], timeout=WATCH_S))[0]:
            if not self._is_open(session):
                raise ApiError("the episode has ended", status=404)
            if await request.is_disconnected():
                self._put(Left(ask))
                raise ClientDisconnect
        answer = future.result()
        if isinstance(answer, CompassError):
            raise ApiError(str(answer), status=409 if not self._is_open(session) else 400)
        return answer
