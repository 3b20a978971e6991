"""HTTP routes of a rollout server. Each needs the run's token; errors are ``{"error": {"field", "message"}}``.

/generate answers NDJSON. Its status waits for the first chunk, `KEEPALIVE_S` at most: an error before that is a status,
a later one the last line ``{"error": …}``. An empty line every `KEEPALIVE_S` shows that the server is alive.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, Protocol

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.common import (
    LimitBody,
    RequireToken,
    add_error_handlers,
    cancel_and_wait,
    complete_openapi,
    content_of,
    context_of,
    error_response,
    opens,
    spans_on,
    start_span,
)
from penstock.common.prometheus import CONTENT_TYPE, METRICS_PATH
from penstock.common.tracing import TRACEPARENT
from penstock.rollout_server.protocol import (
    BadRequest,
    Chunk,
    Draining,
    EngineError,
    GenerateRequest,
    Health,
    ModelEntry,
    ModelList,
    VersionsDisproved,
    versions_of,
)
from penstock.rollout_server.request_queue import DeadlineExceeded, NotServing, QueueFull, TooOld
from penstock.rollout_server.sidecar import Sidecar
from penstock.weight_sync import WeightsStatus

KEEPALIVE_S = 5.0
PULL_WAIT_S = 10.0
REFUSALS = {
    "400": "The body cannot be read",
    "401": "No token of this run",
    "413": "The body is too long",
    "422": "The request is invalid at every server; `field` says where",
}
"""Of every route but those of episodes, which declare their own, in OpenAI's shape."""
EPISODES = "/episodes"
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


class Mounted(Protocol):
    """Further routes of a rollout server, given in `ServerJob.mount`."""

    @property
    def router(self) -> APIRouter: ...

    def allows(self, path: str, token: str) -> bool:
        """Whether `token`, which is not the run's, opens `path`; asked for every path. Compares in constant time."""

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
    mounted: Mounted | None = None,
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
    add_error_handlers(app, dict.fromkeys((NotServing, QueueFull, TooOld, BadRequest, EngineError), refusal))
    complete_openapi(app, lambda path: {} if path.startswith(EPISODES) else REFUSALS, (Chunk,))
    _add_generate(app, sidecar)
    _add_weights(app, sidecar)
    _add_health(app, sidecar, model)

    @app.post("/drain", status_code=202)
    async def drain() -> Draining:
        """Take no more requests, finish those in flight, leave the registry and stop."""
        on_drain()
        return Draining(draining=True, in_flight=sidecar.in_flight)

    return app


def _add_generate(app: FastAPI, sidecar: Sidecar) -> None:
    @app.post("/generate", status_code=200, response_class=GenerateResponse, responses=GENERATE_RESPONSES)
    async def generate(request: GenerateRequest, http: Request) -> Response:
        """Token ids in; sampled ids, their logprobs and their policy versions out, as they are sampled."""
        chunks = sidecar.generate(sidecar.admit(request))
        if spans_on():
            chunks = traced(chunks, request, http.headers.get(TRACEPARENT), sidecar.name)
        return GenerateResponse(chunks)


def _add_weights(app: FastAPI, sidecar: Sidecar) -> None:
    @app.get("/weights")
    async def weights() -> WeightsStatus:
        """The loaded version, the newest announced one, the distance between them, and the last loads."""
        return sidecar.weights.status()

    @app.post("/weights", responses={202: {"model": WeightsStatus, "description": "The load has not ended yet"}})
    async def command(_command: WeightsCommand, response: Response) -> WeightsStatus:
        """Pull now; answers when the attempt has ended, or after 10 s."""
        if not await sidecar.pull_now(PULL_WAIT_S):
            response.status_code = 202
        return sidecar.weights.status()


def _add_health(app: FastAPI, sidecar: Sidecar, model: str) -> None:
    unhealthy: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not serving; see `cause`"}}

    @app.get("/health", response_model=Health, responses=unhealthy)
    async def health() -> Response:
        """200 where this server accepts requests and samples; 503 with the cause otherwise."""
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


def refusal(error: Exception) -> JSONResponse:
    """The response to a request that failed with `error`."""
    match error:
        case BadRequest():
            return error_response(422, error.field, str(error))
        case TooOld():
            return error_response(409, "min_version", str(error))
        case DeadlineExceeded():
            return error_response(504, "deadline_s", str(error))
        case NotServing():
            return error_response(503, "", str(error), retry_after_s=1)
        case QueueFull():
            return error_response(429, "", str(error), retry_after_s=1)
        case EngineError():
            return error_response(502, "", str(error))
        case _:
            raise error


# the answer --------------------------------------------------------------------------------------------------------
class GenerateResponse(Response):
    """Streams `chunks`; closes them when it ends or the client disconnects, so that the engine stops as well."""

    media_type = "application/x-ndjson"

    def __init__(self, chunks: AsyncGenerator[Chunk]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._chunks = chunks
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnected = asyncio.ensure_future(_disconnected(receive))
        try:
            await self._send_all(send, disconnected)
        except (DeadlineExceeded, EngineError) as error:
            if self._started:
                await self._send(send, error_line(error), last=True)
            else:
                await refusal(error)(scope, receive, send)
        finally:
            await cancel_and_wait([disconnected])

    async def _send_all(self, send: Send, disconnected: asyncio.Future[None]) -> None:
        following = asyncio.ensure_future(anext(self._chunks, None))
        try:
            while True:
                waiting: set[asyncio.Future[Any]] = {following, disconnected}
                await asyncio.wait(waiting, timeout=KEEPALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if disconnected.done():
                    return
                if not following.done():
                    await self._send(send, b"\n")
                    continue
                chunk = following.result()
                last = chunk is None or chunk.finish_reason is not None
                await self._send(send, chunk_line(chunk) if chunk else b"", last=last)
                if last:
                    return
                following = asyncio.ensure_future(anext(self._chunks, None))
        finally:
            await cancel_and_wait([following])
            await self._chunks.aclose()

    async def _send(self, send: Send, line: bytes, *, last: bool = False) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": line, "more_body": not last})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def chunk_line(chunk: Chunk) -> bytes:
    """One line of the answer."""
    return _line(
        {
            "token_ids": chunk.token_ids,
            "logprobs": chunk.logprobs,
            "version_spans": chunk.version_spans,
            "finish_reason": chunk.finish_reason,
        }
    )


def error_line(error: Exception) -> bytes:
    """The last line of an answer that broke off."""
    field = ""
    if isinstance(error, DeadlineExceeded):
        field = "deadline_s"
    elif isinstance(error, VersionsDisproved):
        field = "version_spans"
    return _line({"error": {"field": field, "message": str(error)}})


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


async def traced(
    chunks: AsyncGenerator[Chunk], request: GenerateRequest, traceparent: str | None, server: str
) -> AsyncGenerator[Chunk]:
    """`chunks`, inside a server span under the caller's."""
    usage = {"operation": "text_completion", "input_tokens": len(request.token_ids)}
    facts = {**usage, "episode": request.episode_id or None, "server_name": server}
    span = start_span("sample", context_of(traceparent), facts, server=True)
    tokens, versions, reason = 0, set[int](), "broken"
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                tokens += len(chunk.token_ids)
                versions |= {version for version, _, _ in chunk.version_spans}
                reason = chunk.finish_reason or reason
                yield chunk
    except Exception as error:
        span.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        span.note(output_tokens=tokens, finish_reason=reason, **versions_of(versions))
        span.end()
