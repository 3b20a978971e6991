"""Bounds on the bytes of requests in the memory of the API's process."""

from __future__ import annotations

from collections import Counter

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.common import LimitBody, error_response, header
from penstock.service.metrics import ApiMetrics

MOST_BYTES = 64 << 20
"""The bound of a body of ``forward_backward``."""


class BoundBodies:
    """ASGI layer: 413 for a body over its route's bound; 429 for one with which the bodies of an owner that are
    received or checked would have more than 4 · `MOST_BYTES`. A slow client keeps out no other owner."""

    def __init__(self, app: ASGIApp, json_bytes: int, metrics: ApiMetrics, retry_s: float) -> None:
        """`json_bytes`: bound of a body of JSON, which takes many times its size when it is read."""
        self._data, self._json = LimitBody(app, MOST_BYTES), LimitBody(app, json_bytes)
        self._metrics, self._retry_s = metrics, retry_s
        self._held: Counter[str] = Counter()
        """Bytes by owner."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._json(scope, receive, send)
            return
        limit = self._data if scope["path"] == "/api/v1/forward_backward" else self._json
        owner, length = scope.get("state", {}).get("owner", ""), header(scope, b"content-length")
        reserved, received = int(length) if length.isdigit() else 0, 0
        if reserved > MOST_BYTES:
            await limit(scope, receive, send)  # 413
            return
        if refusal := self._refusal(owner, reserved):
            await error_response(429, "", refusal, retry_after_s=self._retry_s)(scope, receive, send)
            return
        self._held[owner] += reserved

        async def counted() -> Message:
            nonlocal received, reserved
            part = await receive()
            received += len(part.get("body", b""))
            if (more := received - reserved) > 0:
                reserved += more
                self._held[owner] += more
                if refusal := self._refusal(owner, 0):
                    raise HTTPException(429, refusal, headers={"Retry-After": f"{self._retry_s:.0f}"})
            return part

        try:
            await limit(scope, counted, send)
        finally:
            self._held[owner] -= reserved

    def _refusal(self, owner: str, size: int) -> str:
        """Empty if there is room for `size` more bytes of the owner."""
        most = 4 * MOST_BYTES
        if self._held[owner] + size <= most:
            return ""
        self._metrics.refusals.labels("memory").inc()
        return f"bodies of this key that are being received would have more than {most} bytes"
