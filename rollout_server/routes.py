"""The sidecar's HTTP routes. Every one needs the run's token; errors are `{"error": {"field", "message"}}`.

A stream of chunks as an HTTP response of NDJSON lines.

The status waits for the first chunk, `KEEPALIVE_S` at most: what goes wrong before it is a status of its own, what goes
wrong later a last line ``{"error": …}``. An empty line every `KEEPALIVE_S` says that the server lives.

Every refusal has one shape, `{"error": {"field", "message"}}`, whoever raised it.

What FastAPI leaves out of the OpenAPI schema: the token, the shape of refusals, NDJSON answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal, Protocol

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.rollout_server.access import LimitBody, OpensMetrics, RequireToken
from penstock.rollout_server.protocol import (
    BadRequest,
    Chunk,
    Draining,
    EngineError,
    ErrorBody,
    GenerateRequest,
    Health,
    ModelEntry,
    ModelList,
    WeightsStatus,
)
from penstock.rollout_server.request_queue import DeadlineOver, NotServing, QueueFull, TooOld
from penstock.rollout_server.sidecar import Sidecar
from penstock.rollout_server.tracing import HEADER, TRACING, answered

PULL_WAIT_S = 10.0
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Mounted(Protocol):
    """Further routes of a sidecar, given from above (`ServerJob.mount`)."""

    @property
    def router(self) -> APIRouter: ...

    def also(self, path: str, token: str) -> bool:
        """See `access.AlsoAllowed`: asked for tokens that are not the run's, on every path of this server."""

    async def close(self) -> None:
        """The last call, after HTTP has ended."""


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
    mounted: Mounted | None = None,
    *,
    metrics_token: str = "",
) -> ASGIApp:
    """The routes around `sidecar`; `on_drain` is called once somebody asks this server to go.

    `metrics_token` opens ``/metrics`` and nothing else; empty: there is none.
    """
    app = make_routes(sidecar, model, on_drain)
    if mounted is not None:
        app.include_router(mounted.router)
    return RequireToken(LimitBody(app), token, OpensMetrics(metrics_token, mounted.also if mounted else None))


def make_routes(sidecar: Sidecar, model: str, on_drain: Callable[[], None]) -> FastAPI:
    """The routes without the layers around them."""
    app = FastAPI(title="Penstock rollout server", docs_url=None, redoc_url=None)
    add_error_handlers(app)
    complete_schema(app)
    _add_generate(app, sidecar)
    _add_weights(app, sidecar)
    _add_watching(app, sidecar, model)

    @app.post("/drain", status_code=202)
    async def drain() -> Draining:
        """Take no more requests, finish those in flight, leave the registry and end."""
        on_drain()
        return Draining(draining=True, in_flight=sidecar.in_flight)

    return app


def _add_generate(app: FastAPI, sidecar: Sidecar) -> None:
    @app.post("/generate", status_code=200, response_class=AnswerResponse, responses={**NDJSON, **GENERATE_REFUSALS})
    async def generate(request: GenerateRequest, http: Request) -> Response:
        """Ids in; ids, their logprobs and the versions that sampled them out, as they are sampled."""
        chunks = sidecar.generate(sidecar.admit(request))
        if TRACING.tracer is not None:
            chunks = answered(chunks, request, http.headers.get(HEADER), sidecar.name)
        return AnswerResponse(chunks)


def _add_weights(app: FastAPI, sidecar: Sidecar) -> None:
    @app.get("/weights")
    async def weights() -> WeightsStatus:
        """The version that is held, the newest announced, how far behind, and the last loads."""
        return sidecar.weights.status()

    @app.post("/weights", responses={202: {"model": WeightsStatus, "description": "The load has not ended yet"}})
    async def command(_asked: WeightsCommand, response: Response) -> WeightsStatus:
        """Pull now; answered when the attempt has ended, or after 10 s."""
        if not await sidecar.pull_now(PULL_WAIT_S):
            response.status_code = 202
        return sidecar.weights.status()


def _add_watching(app: FastAPI, sidecar: Sidecar, model: str) -> None:
    unwell: dict[int | str, dict[str, Any]] = {
        503: {"model": Health, "description": "No requests here; `cause` says why"}
    }

    @app.get("/health", response_model=Health, responses=unwell)
    async def health() -> Response:
        """200 where this server takes requests and samples; 503 with the cause otherwise."""
        report = sidecar.health()
        return JSONResponse(report.model_dump(mode="json"), status_code=200 if report.ok else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(sidecar.metrics.text(), media_type=PROMETHEUS)

    @app.get("/v1/models")
    async def models() -> ModelList:
        """The model, its context length and the policy version."""
        length = sidecar.info.max_model_len if sidecar.info else None
        return ModelList(data=[ModelEntry(id=model, max_model_len=length, policy_version=sidecar.version)])


KEEPALIVE_S = 5.0


class AnswerResponse(Response):
    """Closes `chunks` when it ends, or when the client has gone: the engine does not go on for nobody."""

    media_type = "application/x-ndjson"

    def __init__(self, chunks: AsyncGenerator[Chunk]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._chunks = chunks
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await self._send_all(send, gone)
        except (DeadlineOver, EngineError) as error:
            if self._started:
                await self._send(send, dump_error(error), last=True)
            else:
                await refusal(error)(scope, receive, send)
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _send_all(self, send: Send, gone: asyncio.Future[None]) -> None:
        following = asyncio.ensure_future(anext(self._chunks, None))
        try:
            while True:
                waiting: set[asyncio.Future[Any]] = {following, gone}
                await asyncio.wait(waiting, timeout=KEEPALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if not following.done():
                    await self._send(send, b"\n")
                    continue
                chunk = following.result()
                last = chunk is None or chunk.finish_reason is not None
                await self._send(send, dump_line(chunk) if chunk else b"", last=last)
                if last:
                    return
                following = asyncio.ensure_future(anext(self._chunks, None))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await self._chunks.aclose()

    async def _send(self, send: Send, line: bytes, *, last: bool = False) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": line, "more_body": not last})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def dump_line(chunk: Chunk) -> bytes:
    """One line of the answer."""
    return _dump(
        {
            "token_ids": chunk.token_ids,
            "logprobs": chunk.logprobs,
            "version_spans": chunk.version_spans,
            "finish_reason": chunk.finish_reason,
        }
    )


def dump_error(error: Exception) -> bytes:
    """The last line of an answer that broke off."""
    field = "deadline_s" if isinstance(error, DeadlineOver) else ""
    return _dump({"error": {"field": field, "message": str(error)}})


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


logger = logging.getLogger(__name__)
RETRY_AFTER_S = "1"


def error_response(status: int, field: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"field": field, "message": message}}, status_code=status)


def refusal(error: Exception) -> JSONResponse:
    """The response to a generate call that cannot be answered, by what was raised."""
    match error:
        case BadRequest():
            return error_response(422, error.field, str(error))
        case TooOld():
            return error_response(409, "min_version", str(error))
        case DeadlineOver():
            return error_response(504, "deadline_s", str(error))
        case NotServing() | QueueFull():
            response = error_response(503 if isinstance(error, NotServing) else 429, "", str(error))
            response.headers["Retry-After"] = RETRY_AFTER_S
            return response
        case EngineError():
            return error_response(502, "", str(error))
        case _:
            raise error


def add_error_handlers(app: FastAPI) -> None:
    async def refused(_request: Request, error: Exception) -> Response:
        return refusal(error)

    for kind in (NotServing, QueueFull, TooOld, BadRequest, EngineError):
        app.add_exception_handler(kind, refused)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(422, *_what_is_wrong(request, error))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(
            {"error": {"field": "", "message": message}}, status_code=error.status_code, headers=error.headers
        )

    @app.exception_handler(Exception)
    async def ours(request: Request, error: Exception) -> Response:
        return error_response(500, "", f"{request.method} {request.url.path} failed here: {type(error).__name__}")


def _what_is_wrong(request: Request, error: RequestValidationError) -> tuple[str, str]:
    """(field, message) of the first mistake."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return "", f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}"
    field = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["loc"] == ("body",) and "json" not in request.headers.get("content-type", ""):
        return "", "the body must be JSON, sent with Content-Type: application/json"
    return field, f"{field or 'body'}: {first['msg']}"


REFUSALS = {
    "400": "The body cannot be read",
    "401": "No token of this run",
    "413": "The body is too long",
    "422": "The request is wrong, here and everywhere; `field` says where",
}
"""Every route's."""
GENERATE_REFUSALS: dict[int | str, dict[str, Any]] = {
    409: {"description": "The weights here are older than `min_version`"},
    429: {"description": "The queue here is long: ask another server"},
    502: {"description": "The engine failed before the first token"},
    503: {"description": "Starting, loading the first weights, or draining"},
    504: {"description": "`deadline_s` ran out before the first token"},
}


def complete_schema(app: FastAPI) -> None:
    """Make ``app.openapi()`` complete, for routes that are mounted later as well."""
    made_by_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(made_by_fastapi())
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(schema: dict[str, Any]) -> None:
    components = schema.setdefault("components", {})
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"token": []}]
    schemas = components.setdefault("schemas", {})
    for model in (ErrorBody, Chunk):
        described = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(described.pop("$defs", {}))
        schemas[model.__name__] = described
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for operations in schema["paths"].values():
        for operation in operations.values():
            _complete_responses(operation["responses"])


def _complete_responses(responses: dict[str, Any]) -> None:
    if "HTTPValidationError" in str(responses.get("422", "")):
        del responses["422"]
    for status, description in REFUSALS.items():
        responses.setdefault(status, {"description": description})
    for status, response in responses.items():
        if status.isdigit() and int(status) >= 400:
            response.setdefault("content", _content("application/json", "ErrorBody"))


def _content(media_type: str, model: str) -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": f"#/components/schemas/{model}"}}}


NDJSON: dict[int | str, dict[str, Any]] = {
    200: {
        "description": 'One `Chunk` per line; the last has `finish_reason`, or is `{"error": …}`.',
        "content": _content("application/x-ndjson", "Chunk"),
    }
}
