"""Access to the page: its tokens, which allow reading or changing, and the headers of its responses.

The page's own files hold no data and need no token. Everything under `DATA` does, in a header: a token in an address
would stay in the browser's history, and one in a cookie would go to every other port of the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.common import HttpError, same_token

DATA = "/api/"
READ, WRITE = "read", "write"
HEADERS = {
    # Trusted types with no policy: a line that hands text to the HTML parser throws, from any author.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
    "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that open the page."""

    write: str = field(repr=False)
    """Reads everything and requeues dead letters."""
    read: str = field(default="", repr=False)
    """Reads everything. Empty: no such token."""

    def scope_of(self, token: str) -> str | None:
        """Returns `WRITE`, `READ` or None for a bearer token, in constant time."""
        writes, reads = same_token(token, self.write), same_token(token, self.read)
        return WRITE if writes else READ if reads else None

    def authorize(self, scope: Scope, token: str) -> dict[str, str] | None:
        """Return the request's scope; None for a wrong token. Raises `HttpError` 403 for a change that it excludes."""
        allowed = self.scope_of(token)
        if allowed is None:
            return None
        if scope["method"] not in ("GET", "HEAD") and allowed != WRITE:
            raise HttpError(403, "authorization", "this token may look, not change")
        return {"scope": allowed}


class SecureHeaders:
    """Adds the security headers to every response, errors included. Data is not cached."""

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
