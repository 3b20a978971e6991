"""Around all routes, known or not: a token first, and bodies of bearable length; no query that nobody reads."""

from __future__ import annotations

import hmac

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.sandbox.server.callers import Caller, find_caller
from penstock.sandbox.server.errors import BadRequest, refusal
from penstock.sandbox.session import MAX_FILE_BYTES

MOST_BODY_BYTES = MAX_FILE_BYTES + (16 << 20)
"""A file of the largest size in base64, and some."""


async def known_query(request: Request) -> None:
    """A misspelt option must not be one that has no effect. Raises `BadRequest`."""
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    if strangers := set(request.query_params) - known:
        raise BadRequest("query", f"no such option here: {', '.join(sorted(strangers))[:200]!r}")


class RequireToken:
    """401 for whoever has none of the tokens; for others the caller lies in ``request.state.caller``."""

    def __init__(self, app: ASGIApp, callers: tuple[Caller, ...], metrics_token: str = "") -> None:
        """`metrics_token` opens ``/metrics`` and nothing else; empty: there is none."""
        self.app = app
        self._callers = callers
        self._for_metrics = f"Bearer {metrics_token}".encode() if metrics_token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope.get("headers", []) if name == b"authorization"), b"")
        if self._opens_metrics(scope, given):
            await self.app(scope, receive, send)
            return
        caller = find_caller(self._callers, given)
        if caller is None:
            answer = refusal(401, "a bearer token of this server is needed")
            answer.headers["WWW-Authenticate"] = "Bearer"
            await answer(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        await self.app(scope, receive, send)

    def _opens_metrics(self, scope: Scope, given: bytes) -> bool:
        if self._for_metrics is None or scope["path"] != "/metrics":
            return False
        return hmac.compare_digest(given, self._for_metrics)


class LimitBody:
    """413 for bodies over `most_bytes`, announced or sent: the length that a client announces proves nothing."""

    def __init__(self, app: ASGIApp, most_bytes: int = MOST_BODY_BYTES) -> None:
        self.app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body is longer than {self._most_bytes} bytes"
        length = next((value for name, value in scope.get("headers", []) if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self._most_bytes:
            await refusal(413, message)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            part = await receive()
            received += len(part.get("body", b""))
            if received > self._most_bytes:
                raise HTTPException(413, message)
            return part

        await self.app(scope, counted, send)
