"""`penstock sandbox`: sessions over HTTP, for workers that cannot or should not hold boxes themselves.

    POST   /sessions                  {"label", "ttl_s"}              → {"session_id", "ttl_s"}
    GET    /sessions/{id}                                             → {"session_id", "label", "idle_s", "ttl_s"}
    POST   /sessions/{id}/run         {"argv", "stdin", "timeout_s"}  → a RunResult's fields
    POST   /sessions/{id}/run_python  {"code", "timeout_s"}           → a RunResult's fields
    PUT    /sessions/{id}/files?path=                                   bytes in
    GET    /sessions/{id}/files?path=&max_bytes=                        bytes out
    DELETE /sessions/{id}
    GET    /health                                                    → {"sessions", "max_boxes", "containment"}

A request with an ``Idempotency-Key`` that was used before (in its session; for POST /sessions: by a living one) is
answered as the first was, not done again, also while the first is still under way.

Every route needs ``Authorization: Bearer TOKEN``. 404: no such session (any more). 409: the file could not be opened
(with `errno`). 503: the sandbox failed. A session that nobody used for its `ttl_s` is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from penstock.sandbox.call_key import HEADER
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.make import make_sandbox
from penstock.sandbox.protocol import Sandbox, SandboxError, SandboxLost
from penstock.sandbox.registry import SessionRegistry
from penstock.sandbox.session import MAX_FILE_BYTES

logger = logging.getLogger(__name__)

MAX_TIMEOUT_S = 3600.0
Key = Annotated[str | None, Header(alias=HEADER, min_length=8, max_length=128)]


class StartRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    label: str = Field("", max_length=256)
    ttl_s: float = Field(900.0, gt=0, le=86400)


class RunRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    argv: list[str] = Field(min_length=1)
    stdin: str = ""
    timeout_s: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)


class RunPythonRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    code: str
    timeout_s: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)


def build_app(sandbox: Sandbox, token: str, max_boxes: int) -> FastAPI:
    """The server as an ASGI app; its lifespan ends every box. Raises `ValueError` on an empty token."""
    if not token:
        raise ValueError("the sandbox server needs a token")
    sessions = SessionRegistry(sandbox)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reaper = asyncio.create_task(sessions.reap_for_ever())
        try:
            yield
        finally:
            reaper.cancel()
            await asyncio.gather(reaper, return_exceptions=True)
            await sandbox.close()

    # without an openapi_url there are no pages about the routes, which would not ask for the token
    app = FastAPI(lifespan=lifespan, dependencies=[Depends(_authorize(token))], openapi_url=None)
    _add_error_handlers(app)
    _add_session_routes(app, sessions)
    _add_work_routes(app, sessions)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        containment = getattr(sandbox, "containment", "")
        return {"sessions": len(sessions), "max_boxes": max_boxes, "containment": containment}

    return app


def _authorize(token: str) -> Any:
    expected = f"Bearer {token}".encode()

    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, expected):
            raise HTTPException(401, "a bearer token is needed", headers={"WWW-Authenticate": "Bearer"})

    return check


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(SandboxLost)
    async def lost(_: Request, error: SandboxLost) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 404)

    @app.exception_handler(SandboxError)
    async def failed(_: Request, error: SandboxError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 503)

    @app.exception_handler(OSError)
    async def no_file(_: Request, error: OSError) -> JSONResponse:
        return JSONResponse({"errno": error.errno or 5, "detail": error.strerror or str(error)}, 409)


def _add_session_routes(app: FastAPI, sessions: SessionRegistry) -> None:
    @app.post("/sessions")
    async def start(body: StartRequest, key: Key = None) -> dict[str, Any]:
        entry = await sessions.start(body.label, body.ttl_s, key)
        return {"session_id": entry.session.session_id, "ttl_s": entry.ttl_s}

    @app.get("/sessions/{session_id}")
    async def show(session_id: str) -> dict[str, Any]:
        entry = sessions.get(session_id)
        return {"session_id": session_id, "label": entry.label, "idle_s": entry.idle_s, "ttl_s": entry.ttl_s}

    @app.delete("/sessions/{session_id}", status_code=204)
    async def end(session_id: str) -> None:
        await sessions.end(session_id)


def _add_work_routes(app: FastAPI, sessions: SessionRegistry) -> None:
    @app.post("/sessions/{session_id}/run")
    async def run(session_id: str, body: RunRequest, key: Key = None) -> dict[str, Any]:
        return asdict(
            await sessions.use(
                session_id, key, lambda session: session.run(body.argv, stdin=body.stdin, timeout_s=body.timeout_s)
            )
        )

    @app.post("/sessions/{session_id}/run_python")
    async def run_python(session_id: str, body: RunPythonRequest, key: Key = None) -> dict[str, Any]:
        return asdict(
            await sessions.use(session_id, key, lambda session: session.run_python(body.code, timeout_s=body.timeout_s))
        )

    @app.put("/sessions/{session_id}/files", status_code=204)
    async def write_file(session_id: str, path: str, request: Request, key: Key = None) -> None:
        sessions.get(session_id)  # no body is read for a session that is gone
        data = await _body(request)
        await sessions.use(session_id, key, lambda session: session.write_file(path, data))

    @app.get("/sessions/{session_id}/files")
    async def read_file(session_id: str, path: str, max_bytes: int = 1 << 20, key: Key = None) -> Response:
        most = max(0, max_bytes)
        data = await sessions.use(session_id, key, lambda session: session.read_file(path, most))
        return Response(data, media_type="application/octet-stream")


async def _body(request: Request) -> bytes:
    """Read with a limit: the length that a client announces proves nothing."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_FILE_BYTES:
            raise HTTPException(413, f"more than {MAX_FILE_BYTES} bytes in one file")
    return bytes(data)


async def serve(config: SandboxConfig, host: str, port: int, token: str) -> None:
    """Until cancelled or told by SIGTERM; every box is ended then.

    Raises:
        SandboxError: no box can be made here, or the port is taken.
    """
    if config.backend == "remote":
        raise SandboxError("a sandbox server holds boxes itself: sandbox.backend must be bwrap")
    listener = _listen(host, port)
    app = build_app(make_sandbox(config, f"sandbox-{port}"), token, config.max_boxes)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    logger.info("sandbox server on http://%s:%d", host, listener.getsockname()[1])
    try:
        await asyncio.shield(task)
    finally:
        server.should_exit = True
        await task
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise SandboxError(f"port {port} on {host} is in use or not ours: {error.strerror}; choose another") from error
