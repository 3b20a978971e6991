"""The page: its static files, its API and its process. `access.py` decides who may call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.types import ASGIApp

from penstock.common import LimitBody, RequireToken, add_error_handlers, error_response, listen, serve
from penstock.dashboard.access import DATA, READ, SecureHeaders, Tokens
from penstock.dashboard.live import DEADLINE_S, LiveQueues, NotAlive, Pulse
from penstock.dashboard.routes import live_routes, run_routes
from penstock.dashboard.runs import NoSuchRun, RunFolders
from penstock.transfer_queue import QueueError, QueueUnavailable

STATIC = Path(__file__).parent / "static"
MAX_BODY_BYTES = 64 << 10


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
    add_error_handlers(app, dict.fromkeys((NoSuchRun, NotAlive, TimeoutError, QueueError), _refusal))
    app.include_router(run_routes(folders, pulse))
    app.include_router(live_routes(folders, pulse))

    @app.get(f"{DATA}session")
    async def session(request: Request) -> dict[str, str]:
        """Return the scope of the caller's token."""
        return {"scope": getattr(request.state, "scope", READ), "runs_dir": str(runs_dir)}

    @app.get("/", response_class=FileResponse)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html")

    app.mount("/static", StaticFiles(directory=STATIC))
    limited = LimitBody(app, MAX_BODY_BYTES)
    return SecureHeaders(
        RequireToken(limited, tokens.authorize, prefix=DATA, message="a bearer token of this page is needed")
    )


def _refusal(error: Exception) -> Response:
    match error:
        case NoSuchRun():
            return error_response(404, "run", str(error))
        case NotAlive():
            return error_response(409, "run", str(error))
        case TimeoutError():
            return error_response(503, "", f"the queue did not answer within {DEADLINE_S:g} s")
        case _:
            return error_response(503 if isinstance(error, QueueUnavailable) else 409, "", str(error))


class CannotListen(Exception):
    """The address or port is not free; the message says what to choose."""


async def serve_page(
    runs_dir: Path, queues: LiveQueues, tokens: Tokens, *, host: str, port: int, say: Callable[[str], None]
) -> None:
    """Serves until cancelled or stopped by SIGTERM; `say` gets the URL once it listens. Raises `CannotListen`."""
    try:
        listener = listen(host, port)
    except OSError as error:
        raise CannotListen(str(error.strerror)) from error
    app = make_app(runs_dir, queues, tokens)
    await serve(app, listener, on_ready=lambda url: say(f"{url}/"), stop_s=5)
