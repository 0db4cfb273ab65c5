"""The endpoints of the Tinker API over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from anyio import to_thread
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker import types

from compass_jax.apps.tinker.answers import public_answer
from compass_jax.apps.tinker.errors import refuse
from compass_jax.apps.tinker.service import Service
from compass_jax.apps.tinker.wire import PROTOBUF, json_body, training_request
from compass_jax.base.aliases import JsonObject
from compass_jax.rollout.serving.errors import ApiError
from compass_jax.rollout.serving.guard import Guard
from compass_jax.rollout.serving.limits import Limits
from compass_jax.rollout.serving.openai_api import on_error, read_request

Handler = Callable[[Request], Awaitable[Response]]
KEY_HEADER = "x-api-key"
# The client's flags that this server sets; others have the client's defaults.
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,  # requests arrive in order of their numbers
    "proto_compress_fwdbwd": False,
    "use_pyqwest_transport": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
}


class Endpoints:
    """The handlers of the endpoints."""

    def __init__(self, service: Service, limits: Limits):
        self.service, self.limits = service, limits
        submits: dict[str, tuple[type[BaseModel], Callable[[Any], str]]] = {
            "create_model": (types.CreateModelRequest, service.create_model),
            "optim_step": (types.OptimStepRequest, service.update),
            "save_weights": (types.SaveWeightsRequest, service.save),
            "load_weights": (types.LoadWeightsRequest, self._load),
            "save_weights_for_sampler": (
                types.SaveWeightsForSamplerRequest,
                service.save_for_sampler,
            ),
            "unload_model": (types.UnloadModelRequest, lambda x: service.unload(x.model_id)),
        }
        replies: dict[str, tuple[type[BaseModel], Callable[[Any], JsonObject]]] = {
            "client/config": (types.ClientConfigRequest, lambda x: CLIENT_CONFIG),
            "client/dynamic_config": (types.ClientConfigRequest, lambda x: {}),
            "create_session": (types.CreateSessionRequest, self._create_session),
            "session_heartbeat": (types.SessionHeartbeatRequest, self._heartbeat),
            "create_sampling_session": (
                types.CreateSamplingSessionRequest,
                lambda x: {"sampling_session_id": service.create_sampler(x)},
            ),
            "get_info": (types.GetInfoRequest, lambda x: service.info(x.model_id)),
            "asample": (types.SampleRequest, self._sample),
        }
        posts: dict[str, Handler] = {
            "forward_backward": self._train,
            "retrieve_future": self._retrieve,
            "telemetry": self._telemetry,
            "sessions/{session}/finish": self._finish,
        }
        posts |= {name: self._submitter(*parts) for name, parts in submits.items()}
        posts |= {name: self._replier(*parts) for name, parts in replies.items()}
        gets = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
        }
        self.routes = [
            *(Route(f"/api/v1/{name}", x, methods=["POST"]) for name, x in posts.items()),
            *(Route(f"/api/v1/{name}", x) for name, x in gets.items()),
        ]

    # ---- forms of endpoints ----------------------------------------------------------------------

    async def _read(self, request: Request, kind: type[BaseModel]) -> BaseModel:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise refuse("a compressed body", "send it as it is")
        return json_body(await read_request(request, self.limits), kind)

    def _submitter(self, kind: type[BaseModel], submit: Callable[[Any], str]):
        async def handle(request: Request) -> Response:
            """Returns the id of a request that is answered later."""
            return JSONResponse({"request_id": submit(await self._read(request, kind))})

        return handle

    def _replier(self, kind: type[BaseModel], reply: Callable[[Any], JsonObject]):
        async def handle(request: Request) -> Response:
            """Returns the answer."""
            return JSONResponse(reply(await self._read(request, kind)))

        return handle

    # ---- endpoints -------------------------------------------------------------------------------

    async def _train(self, request: Request) -> Response:
        if request.headers.get("content-type", "") != PROTOBUF:
            raise refuse("forward_backward in JSON", f"send {PROTOBUF}, as clients from 0.38 do")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise refuse("a compressed body", "send it as it is")
        body = await read_request(request, self.limits)
        parsed = await to_thread.run_sync(training_request, body)
        return JSONResponse({"request_id": self.service.train(parsed), "model_id": parsed.model})

    async def _retrieve(self, request: Request) -> Response:
        body = await self._read(request, types.FutureRetrieveRequest)
        assert isinstance(body, types.FutureRetrieveRequest)
        answer = await self.service.answers.wait(body.request_id)
        if answer is None:
            state = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(state)
        content = public_answer(answer)
        if isinstance(content, bytes):
            return Response(content, media_type=PROTOBUF)
        return JSONResponse(content)

    def _load(self, body: types.LoadWeightsRequest) -> str:
        if body.weights_access_token is not None:
            raise refuse("weights_access_token", "load states of this server")
        if body.session_id is not None:
            return self.service.model_from_state(body)
        return self.service.load(body)

    def _create_session(self, body: types.CreateSessionRequest) -> JsonObject:
        return {"type": "create_session", "session_id": self.service.create_session()}

    def _heartbeat(self, body: types.SessionHeartbeatRequest) -> JsonObject:
        self.service.heartbeat(body.session_id)
        return {"type": "session_heartbeat"}

    def _sample(self, body: types.SampleRequest) -> JsonObject:
        request, sequences = self.service.sample(body)
        return {"request_id": request, "sample_sequence_ids": sequences}

    async def _telemetry(self, request: Request) -> Response:
        await read_request(request, self.limits)
        return JSONResponse({"status": "accepted"})

    async def _finish(self, request: Request) -> Response:
        await read_request(request, self.limits)
        self.service.end_session(request.path_params["session"])
        return JSONResponse({})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _capabilities(self, request: Request) -> Response:
        base = self.service.models.base
        model = {"model_name": base.name, "trainable": True, "sampleable": True}
        model["max_context_length"] = base.engine.config.max_length
        return JSONResponse({"supported_models": [model]})

    async def _sampler(self, request: Request) -> Response:
        return JSONResponse(self.service.sampler_info(request.path_params["sampler"]))


def make_app(service: Service, limits: Limits, hosts: Sequence[str], key: str | None) -> Guard:
    """Returns the application. Clients must send `key` as their API key (None: any)."""
    endpoints = Endpoints(service, limits)
    kinds = (ApiError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=endpoints.routes, exception_handlers={x: on_error for x in kinds})
    app.router.redirect_slashes = False
    paths = [route.path for route in endpoints.routes]
    types_of_bodies = ("application/json", PROTOBUF)
    return Guard(app, paths, hosts, key, key_header=KEY_HEADER, content_types=types_of_bodies)
