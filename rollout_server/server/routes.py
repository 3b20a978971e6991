"""HTTP routes of a rollout server. Each needs the run's token; errors are ``{"error": {"field", "message"}}``.

POST /generate parses its body itself: FastAPI would read every token id of a long context twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from penstock.common import LimitBody, RequireToken, add_error_handlers, complete_openapi, opens, spans_on
from penstock.common.http import content_of
from penstock.common.prometheus import CONTENT_TYPE, METRICS_PATH
from penstock.common.tracing import TRACEPARENT
from penstock.rollout_server.protocol import Chunk, Draining, GenerateRequest, Health, ModelEntry, ModelList
from penstock.rollout_server.server.answers import REFUSED, GenerateResponse, refusal, traced
from penstock.rollout_server.server.sidecar import Sidecar
from penstock.weight_sync import WeightsStatus

REFUSALS = {
    "400": "The body cannot be read",
    "401": "No token of this run",
    "413": "The body is too long",
    "422": "The request is invalid at every server; `field` says where",
}
"""Refusals of every route except those of episodes, which declare their own in OpenAI's shape."""
GENERATE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": 'One `Chunk` per line; the last has `finish_reason`, or is `{"error": …}`.',
        "content": content_of("application/x-ndjson", "Chunk"),
    },
    409: {"description": "The weights here are older than `min_version`"},
    429: {"description": "The queue here is full: ask another server"},
    502: {"description": "The engine failed before the first token"},
    503: {"description": "Starting, loading the first weights, or draining"},
    504: {"description": "`deadline_s` passed before the first token"},
}


class MountedRoutes(Protocol):
    """Further routes of a rollout server, given in `ServerJob.mount`."""

    @property
    def router(self) -> APIRouter: ...

    def allows(self, path: str, token: str) -> bool:
        """Returns True if `token`, which is not the run's, opens `path`. Compares in constant time."""

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """`app`, which is the whole server with its access control, inside the layers that these routes need."""

    async def close(self) -> None:
        """The last call, after HTTP has stopped."""


class WeightsCommand(BaseModel):
    """Body of POST /weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    action: Literal["pull"]
    """Look for newer weights now; refused ones are tried again."""


def make_app(
    sidecar: Sidecar,
    model: str,
    token: str,
    on_drain: Callable[[], None],
    mounted: MountedRoutes | None = None,
    *,
    metrics_token: str = "",
) -> ASGIApp:
    """The routes with access control.

    Args:
        on_drain: called on POST /drain.
        metrics_token: opens ``/metrics`` and nothing else; empty: there is none.
    """
    app = make_routes(sidecar, model, on_drain)
    if mounted is not None:
        app.include_router(mounted.router)
    authorize = opens(token, {METRICS_PATH: metrics_token}, further=mounted.allows if mounted else None)
    guarded = RequireToken(LimitBody(app), authorize, message="a bearer token of this run is needed")
    return guarded if mounted is None else mounted.wrap(guarded)


def make_routes(sidecar: Sidecar, model: str, on_drain: Callable[[], None]) -> FastAPI:
    """The routes without access control."""
    app = FastAPI(title="Penstock rollout server", docs_url=None, redoc_url=None)
    add_error_handlers(app, dict.fromkeys(REFUSED, refusal))
    complete_openapi(app, lambda path: {} if path.startswith("/episodes") else REFUSALS, (Chunk, GenerateRequest))
    _add_generate(app, sidecar)
    _add_weights(app, sidecar)
    _add_health(app, sidecar, model)

    @app.post("/drain", status_code=202)
    async def drain() -> Draining:
        """Take no more requests, finish those in flight, leave the registry and stop."""
        on_drain()
        return Draining(draining=True, in_flight=sidecar.requests.in_flight)

    return app


def _add_generate(app: FastAPI, sidecar: Sidecar) -> None:
    body = {"requestBody": {"required": True, "content": content_of("application/json", "GenerateRequest")}}

    @app.post(
        "/generate", status_code=200, response_class=GenerateResponse, responses=GENERATE_RESPONSES, openapi_extra=body
    )
    async def generate(http: Request) -> Response:
        """Token ids in; sampled ids, their logprobs and their policy versions out, as they are sampled."""
        request = await _read_request(http)
        chunks = sidecar.generate(sidecar.admit(request))
        if spans_on():
            chunks = traced(chunks, request, http.headers.get(TRACEPARENT), sidecar.name)
        return GenerateResponse(chunks)


async def _read_request(http: Request) -> GenerateRequest:
    """Raises `RequestValidationError`, and `HTTPException` if the client is gone before its body is whole, as FastAPI
    does."""
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestValidationError([{"loc": ("body",), "type": "json_type", "msg": "is not JSON"}])
    try:
        return GenerateRequest.model_validate_json(await http.body())
    except ClientDisconnect as error:
        raise HTTPException(400, "the body ended early") from error
    except ValidationError as error:
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from error


def _add_weights(app: FastAPI, sidecar: Sidecar) -> None:
    @app.get("/weights")
    async def weights() -> WeightsStatus:
        """The loaded version, the newest announced one, the distance between them, and the last loads."""
        return sidecar.weights.status()

    @app.post("/weights", responses={202: {"model": WeightsStatus, "description": "The load has not ended yet"}})
    async def command(_command: WeightsCommand, response: Response) -> WeightsStatus:
        """Pull now; answers when the attempt has ended, or after 10 s."""
        if not await sidecar.pull_now(10.0):
            response.status_code = 202
        return sidecar.weights.status()


def _add_health(app: FastAPI, sidecar: Sidecar, model: str) -> None:
    unhealthy: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not serving; see `cause`"}}

    @app.get("/health", response_model=Health, responses=unhealthy)
    async def health() -> Response:
        """200 if this server accepts requests and samples; 503 with the cause otherwise."""
        report = sidecar.health()
        return JSONResponse(report.model_dump(mode="json"), status_code=200 if report.ok else 503)

    @app.get(METRICS_PATH, response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(sidecar.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/v1/models")
    async def models() -> ModelList:
        """The model, its context length and the policy version."""
        length = sidecar.info.max_model_len if sidecar.info else None
        return ModelList(
            data=[ModelEntry(id=Path(model).name or model, max_model_len=length, policy_version=sidecar.version)]
        )
