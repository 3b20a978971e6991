"""The server as one ASGI app: access, routes, and boxes that start and end with it; and `serve`, which runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator

from fastapi import Depends, FastAPI, Request, Response
from starlette.types import Scope

from penstock.common import HttpError, LimitBody, RequireToken, cancel_and_wait, listen, opens
from penstock.common import serve as serve_http
from penstock.common.prometheus import CONTENT_TYPE, METRICS_PATH
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.make import make_sandbox
from penstock.sandbox.protocol import Sandbox, SandboxError
from penstock.sandbox.server import run_code
from penstock.sandbox.server.callers import Caller, callers_of, find_caller
from penstock.sandbox.server.routes import ServerState, ThisServer, router, work_router
from penstock.sandbox.server.views import ServerHealth, complete_schema, handle_errors
from penstock.sandbox.session import MAX_FILE_BYTES

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = MAX_FILE_BYTES + (16 << 20)
"""A file of the largest size in base64, and some."""
STOP_DEADLINE_S = 120.0
"""For the whole stop: the last calls, then the end of every box."""


async def serve(config: SandboxConfig, host: str, port: int, token: str, metrics_token: str = "") -> None:
    """Serves until cancelled or stopped by SIGTERM; every box is ended then. `metrics_token` opens ``/metrics`` alone.

    Boxes are named after the port: those that a killed server on the same port left are removed first.

    Raises:
        SandboxError: no box can be made here, the port is taken, or a token is missing.
    """
    if config.backend == "remote":
        raise SandboxError("a sandbox server holds boxes itself: sandbox.backend must not be remote")
    callers = callers_of(config, token, os.environ)
    try:
        listener = listen(host, port)
    except OSError as error:
        raise SandboxError(str(error.strerror)) from error
    app = _app(make_sandbox(config, f"sandbox-{listener.getsockname()[1]}"), config, callers, metrics_token)
    await serve_http(
        app, listener, deadline_s=STOP_DEADLINE_S, on_ready=lambda url: logger.info("sandbox server on %s", url)
    )


def build_app(sandbox: Sandbox, config: SandboxConfig, token: str, metrics_token: str = "") -> FastAPI:
    """The app for the run's own `token` and those of `config.server.callers`, as `serve` runs it.

    Its lifespan owns `sandbox`: every box is ended with it. Raises `SandboxError` if a caller's token is missing.
    """
    return _app(sandbox, config, callers_of(config, token, os.environ), metrics_token)


def _app(sandbox: Sandbox, config: SandboxConfig, callers: tuple[Caller, ...], metrics_token: str) -> FastAPI:
    state = ServerState.of(sandbox, config)
    app = FastAPI(
        title="Penstock sandbox",
        lifespan=lambda _: _living(state),
        dependencies=[Depends(known_query)],
        docs_url=None,
        redoc_url=None,
    )
    app.state.server = state
    app.add_middleware(LimitBody, max_bytes=MAX_BODY_BYTES, no_field=None)
    app.add_middleware(RequireToken, authorize=Access(callers, metrics_token), field=None)
    handle_errors(app)
    for routes in (router, work_router, run_code.router):
        app.include_router(routes)
    _add_views(app)
    complete_schema(app)
    return app


class Access:
    """Puts the caller whose token a request carries into ``request.state.caller``."""

    def __init__(self, callers: tuple[Caller, ...], metrics_token: str) -> None:
        """`metrics_token` opens ``/metrics`` and nothing else; empty: there is none."""
        self._callers = callers
        self._opens_metrics = opens("", {METRICS_PATH: metrics_token})

    def __call__(self, scope: Scope, token: str) -> dict[str, Caller] | None:
        caller = find_caller(self._callers, token)
        if caller is not None:
            return {"caller": caller}
        return {} if self._opens_metrics(scope, token) is not None else None


async def known_query(request: Request) -> None:
    """Refuses unknown options, so that a misspelt one is not ignored. Raises `HttpError`."""
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    if strangers := set(request.query_params) - known:
        raise HttpError(422, "query", f"no such option here: {', '.join(sorted(strangers))[:200]!r}")


@contextlib.asynccontextmanager
async def _living(state: ServerState) -> AsyncIterator[None]:
    state.pool.start()
    reaper = asyncio.create_task(state.sessions.reap_for_ever())
    try:
        yield
    finally:
        await cancel_and_wait([reaper])
        await state.stop()


def _add_views(app: FastAPI) -> None:
    @app.get("/health", response_model=ServerHealth)
    async def health(server: ThisServer) -> ServerHealth:
        """Containment, and how full the server is."""
        return ServerHealth(
            sessions=len(server.sessions.entries),
            warm=server.pool.warm,
            waiting=server.pool.slots.waiting,
            max_boxes=server.config.max_boxes,
            containment=getattr(server.sandbox, "containment", ""),
        )

    @app.get(METRICS_PATH, response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics(server: ThisServer) -> Response:
        """Return metrics in Prometheus' text format."""
        server.measure()
        return Response(server.metrics.text(), media_type=CONTENT_TYPE)
