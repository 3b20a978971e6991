"""Requests that every box needs, answered without FastAPI: its router and dependencies cost more than the responses.

    POST   /sessions
    POST   /sessions/{session_id}/run, run_python, run_shell
    DELETE /sessions/{session_id}

Each calls the function of its route.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.common import read_body, replay_body
from penstock.sandbox.idempotency import HEADER
from penstock.sandbox.protocol import RunResult, SandboxError
from penstock.sandbox.server import routes
from penstock.sandbox.server.routes import KEY_CHARS, ServerState, SessionTarget
from penstock.sandbox.server.views import (
    RunPythonRequest,
    RunRequest,
    RunShellRequest,
    StartRequest,
    WireRequest,
    file_refusal,
    sandbox_refusal,
)

Run = Callable[[Any, SessionTarget], Awaitable[RunResult]]
RUNS: dict[str, tuple[type[WireRequest], Run]] = {
    "run": (RunRequest, routes.run),
    "run_python": (RunPythonRequest, routes.run_python),
    "run_shell": (RunShellRequest, routes.run_shell),
}
W = TypeVar("W", bound=WireRequest)


class QuickSessions:
    """ASGI layer, inside `RequireToken`. Invalid requests go to the app, whose route reports the error."""

    def __init__(self, app: ASGIApp, server: ServerState) -> None:
        self.app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer_to(scope)
        if answer is None:
            await self.app(scope, receive, send)
            return
        body, rest = await read_body(receive)
        try:
            response = await answer(body, Request(scope, receive)) if rest is None else None
        except SandboxError as error:
            response = sandbox_refusal(error)
        except OSError as error:
            response = file_refusal(error)
        if response is None:
            receive = replay_body(body, rest, receive)
        await (response or self.app)(scope, receive, send)

    def _answer_to(self, scope: Scope) -> Callable[[bytes, Request], Awaitable[Response | None]] | None:
        """None for requests that the app answers; the response is None where the request is invalid."""
        if scope["type"] != "http" or scope["query_string"]:
            return None
        match scope["method"], scope["path"].split("/"):
            case "POST", ["", "sessions"]:
                return self._start
            case "POST", ["", "sessions", session_id, verb] if verb in RUNS:
                return lambda body, request: self._run(session_id, verb, body, request)
            case "DELETE", ["", "sessions", session_id] if session_id:
                return lambda _, request: self._end(session_id, request)
        return None

    async def _start(self, body: bytes, request: Request) -> Response | None:
        wanted = _valid(StartRequest, body, request)
        if wanted is None:
            return None
        return _json(await routes.start(wanted, request, self._server, request.state.caller, _key(request)))

    async def _run(self, session_id: str, verb: str, body: bytes, request: Request) -> Response | None:
        kind, run = RUNS[verb]
        wanted = _valid(kind, body, request)
        if wanted is None:
            return None
        entry = self._server.sessions.get(session_id, request.state.caller)
        return _json(await run(wanted, SessionTarget(self._server, entry, _key(request))))

    async def _end(self, session_id: str, request: Request) -> Response:
        await routes.end(session_id, self._server, request.state.caller)
        return Response(status_code=204)


def _valid(kind: type[W], body: bytes, request: Request) -> W | None:
    """None where the body, its type or the idempotency key is invalid, or the type has parameters."""
    key = _key(request)
    if request.headers.get("content-type") != "application/json" or not (key is None or len(key) in KEY_CHARS):
        return None
    try:
        return kind.model_validate_json(body)
    except ValidationError:
        return None


def _key(request: Request) -> str | None:
    return request.headers.get(HEADER)


def _json(answer: object) -> Response:
    return Response(to_json(answer), media_type="application/json")
