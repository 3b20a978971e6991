"""The page's server: its files, and the data behind them. Read `access.py` for who may ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.types import ASGIApp

from penstock.dashboard.access import DATA, READ, RequireScope, SecureHeaders, Tokens
from penstock.dashboard.live import DEADLINE_S, LiveQueues, NotAlive, Pulse
from penstock.dashboard.live_routes import live_routes
from penstock.dashboard.run_routes import run_routes
from penstock.dashboard.runs import NoSuchRun, RunFolders
from penstock.rollout_server import LimitBody, add_error_handlers, error_response
from penstock.transfer_queue import QueueError, QueueUnavailable

STATIC = Path(__file__).parent / "static"
MOST_BODY_BYTES = 64 << 10


def make_app(runs_dir: Path, queues: LiveQueues, tokens: Tokens) -> ASGIApp:
    """The whole page over the runs in `runs_dir`; closes `queues` when it ends."""
    folders, pulse = RunFolders(runs_dir, queues.names), Pulse(queues)

    @contextlib.asynccontextmanager
    async def closing(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(folders.close)
            await queues.close()

    app = FastAPI(title="Penstock dashboard", docs_url=None, redoc_url=None, openapi_url=None, lifespan=closing)
    add_error_handlers(app)
    _add_own_errors(app)
    app.include_router(run_routes(folders, pulse))
    app.include_router(live_routes(folders, pulse))

    @app.get(f"{DATA}session")
    async def session(request: Request) -> dict[str, str]:
        """What the caller's token may do."""
        return {"scope": getattr(request.state, "scope", READ), "runs_dir": str(runs_dir)}

    @app.get("/", response_class=FileResponse)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html")

    app.mount("/static", StaticFiles(directory=STATIC))
    return SecureHeaders(RequireScope(LimitBody(app, MOST_BODY_BYTES), tokens))


def _add_own_errors(app: FastAPI) -> None:
    @app.exception_handler(NoSuchRun)
    async def missing(_request: Request, error: Exception) -> JSONResponse:
        return error_response(404, "run", str(error))

    @app.exception_handler(NotAlive)
    async def not_alive(_request: Request, error: Exception) -> JSONResponse:
        return error_response(409, "run", str(error))

    @app.exception_handler(TimeoutError)
    async def late(_request: Request, _error: Exception) -> JSONResponse:
        return error_response(503, "", f"the queue did not answer within {DEADLINE_S:g} s")

    @app.exception_handler(QueueError)
    async def refused(_request: Request, error: Exception) -> JSONResponse:
        return error_response(503 if isinstance(error, QueueUnavailable) else 409, "", str(error))
