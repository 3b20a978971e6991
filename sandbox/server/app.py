"""The server as one ASGI app: layers around, routes inside, boxes that start and end with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Depends, FastAPI, Response

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.protocol import Sandbox
from penstock.sandbox.server import run_code, session_routes, work_routes
from penstock.sandbox.server.access import LimitBody, RequireToken, known_query
from penstock.sandbox.server.callers import Caller
from penstock.sandbox.server.errors import add_error_handlers
from penstock.sandbox.server.openapi import complete_schema
from penstock.sandbox.server.parts import Parts
from penstock.sandbox.server.session_routes import ThisServer
from penstock.sandbox.server.views import Health


def build_app(sandbox: Sandbox, config: SandboxConfig, callers: tuple[Caller, ...], metrics_token: str = "") -> FastAPI:
    """Its lifespan owns `sandbox`: every box is ended with it."""
    parts = Parts.of(sandbox, config)
    app = FastAPI(
        title="Penstock sandbox",
        lifespan=lambda _: _living(parts),
        dependencies=[Depends(known_query)],
        docs_url=None,
        redoc_url=None,
    )
    app.state.parts = parts
    app.add_middleware(LimitBody)
    app.add_middleware(RequireToken, callers=callers, metrics_token=metrics_token)
    add_error_handlers(app)
    for routes in (session_routes, work_routes, run_code):
        app.include_router(routes.router)
    _add_views(app)
    complete_schema(app)
    return app


@contextlib.asynccontextmanager
async def _living(parts: Parts) -> AsyncIterator[None]:
    parts.pool.start()
    reaper = asyncio.create_task(parts.sessions.reap_for_ever())
    try:
        yield
    finally:
        reaper.cancel()
        await asyncio.gather(reaper, return_exceptions=True)
        await parts.stop()


def _add_views(app: FastAPI) -> None:
    @app.get("/health", response_model=Health)
    async def health(server: ThisServer) -> Health:
        """Which walls stand, and how full the server is."""
        return Health(
            sessions=len(server.sessions.entries),
            warm=server.pool.warm,
            waiting=server.pool.slots.waiting,
            max_boxes=server.config.max_boxes,
            containment=getattr(server.sandbox, "containment", ""),
        )

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics(server: ThisServer) -> Response:
        """In Prometheus' text format."""
        server.measure()
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")
