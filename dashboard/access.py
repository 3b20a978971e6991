"""Who may look and who may change: ASGI layers around all routes of the page.

The page's own files hold no data and need no token. Everything under `DATA` does, in a header: a token in an address
would stay in the browser's history, and one in a cookie would go to every other port of the host.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.rollout_server import error_response

DATA = "/api/"
READ, WRITE = "read", "write"
READING = ("GET", "HEAD")
# Trusted types with no policy: a line that hands text to the HTML parser throws, whoever writes it.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Tokens:
    """What opens the page."""

    write: str = field(repr=False)
    """Looks at everything and queues dead letters again."""
    read: str = field(default="", repr=False)
    """Looks at everything; empty: there is none."""

    def scope_of(self, authorization: bytes) -> str | None:
        """`WRITE`, `READ` or None for an Authorization header; constant time."""
        writes = hmac.compare_digest(authorization, f"Bearer {self.write}".encode())
        reads = hmac.compare_digest(authorization, f"Bearer {self.read}".encode())
        if writes:
            return WRITE
        return READ if reads and self.read else None


class RequireScope:
    """401 for data without a token, 403 for a change without the right to write; ``request.state.scope`` says which."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self.app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(DATA):
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        allowed = self._tokens.scope_of(given)
        if allowed is None:
            refusal = error_response(401, "authorization", "a bearer token of this page is needed")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            await refusal(scope, receive, send)
        elif scope["method"] not in READING and allowed != WRITE:
            await error_response(403, "authorization", "this token may look, not change")(scope, receive, send)
        else:
            scope.setdefault("state", {})["scope"] = allowed
            await self.app(scope, receive, send)


class SecureHeaders:
    """The same headers on every answer, refusals and mistakes included; data is kept by no cache."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers["Cache-Control"] = "no-store" if scope["path"].startswith(DATA) else "no-cache"
            await send(message)

        await self.app(scope, receive, with_headers if scope["type"] == "http" else send)
