"""Who may ask, and how much: ASGI layers around all routes, known or not."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.common import error_response

MOST_BODY_BYTES = 64 << 20
METRICS = "/metrics"
AlsoAllowed = Callable[[str, str], bool]
"""(path, bearer token) → whether that token, which is not the run's, opens that path. Compares in constant time."""


class RequireToken:
    """401 for everything that carries neither the run's token nor one that `also` lets through."""

    def __init__(self, app: ASGIApp, token: str, also: AlsoAllowed | None = None) -> None:
        self.app = app
        self._expected = f"Bearer {token}".encode()
        self._also = also

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allowed(scope):
            await self.app(scope, receive, send)
            return
        refusal = error_response(401, "authorization", "a bearer token of this run is needed")
        refusal.headers["WWW-Authenticate"] = "Bearer"
        await refusal(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = next((value for name, value in scope.get("headers", []) if name == b"authorization"), b"")
        if hmac.compare_digest(given, self._expected):
            return True
        scheme, _, token = given.decode("latin-1").partition(" ")
        return bool(token) and scheme == "Bearer" and self._also is not None and self._also(scope["path"], token)


class OpensMetrics:
    """`AlsoAllowed`: `token` opens ``/metrics`` and nothing else, and `further` what it opens. Empty: no such token."""

    def __init__(self, token: str, further: AlsoAllowed | None = None) -> None:
        self._token = token.encode()
        self._further = further

    def __call__(self, path: str, token: str) -> bool:
        if self._token and path == METRICS and hmac.compare_digest(token.encode(), self._token):
            return True
        return self._further is not None and self._further(path, token)


class LimitBody:
    """413 for bodies over `most_bytes`, said or sent: nobody fills this process's memory."""

    def __init__(self, app: ASGIApp, most_bytes: int = MOST_BODY_BYTES) -> None:
        self.app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = next((value for name, value in scope.get("headers", []) if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self._most_bytes:
            await error_response(413, "", self._message())(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most_bytes:
                raise HTTPException(413, self._message())
            return message

        await self.app(scope, counted, send)

    def _message(self) -> str:
        return f"the body is longer than {self._most_bytes} bytes"
