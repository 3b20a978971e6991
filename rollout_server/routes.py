"""The sidecar's HTTP routes. Every one needs the run's token; errors are `{"error": {"field", "message"}}`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict
from starlette.types import ASGIApp

from penstock.rollout_server.access import LimitBody, OpensMetrics, RequireToken
from penstock.rollout_server.answer_response import AnswerResponse
from penstock.rollout_server.errors import add_error_handlers
from penstock.rollout_server.openapi import GENERATE_REFUSALS, NDJSON, complete_schema
from penstock.rollout_server.protocol import GenerateRequest
from penstock.rollout_server.sidecar import Sidecar
from penstock.rollout_server.tracing import HEADER, TRACING, answered
from penstock.rollout_server.views import Draining, Health, ModelEntry, ModelList, WeightsStatus

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
