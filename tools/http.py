"""HTTP client for tools: one pool per tool, a deadline, and failures classified by whether a retry can help."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any

import httpx

from penstock.tools.base import ToolInfraError, ToolUnavailable

MAX_ANSWER_BYTES = 16 << 20


class JsonClient:
    """Owner of a connection pool, made at the first request; `close` gives it back."""

    def __init__(self, component: str, timeout_s: float = 30.0) -> None:
        self._component = component
        self._timeout_s = timeout_s
        self._client: httpx.AsyncClient | None = None

    async def ask(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: Any = None,
        params: Mapping[str, str] | None = None,
        most_bytes: int = MAX_ANSWER_BYTES,
    ) -> Any:
        """The answer's JSON, which has less than `most_bytes`.

        Raises:
            ToolUnavailable: not reached, no answer in time, or busy: asking again may help.
            ToolInfraError: refused (the status and the beginning of the answer are named), too long, or no JSON.
        """
        # A model's text may hold lone surrogates and a row NaN, which httpx's own encoders refuse.
        content = None if body is None else json.dumps(body).encode("ascii")
        content_type = {} if body is None else {"Content-Type": "application/json"}
        query = {name: value.encode("utf-8", "replace").decode() for name, value in (params or {}).items()} or None
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._pool().stream(
                    method, url, content=content, params=query, headers={**content_type, **headers}
                ) as answer,
            ):
                data = bytearray()
                async for piece in answer.aiter_bytes():
                    data += piece[: most_bytes - len(data)]
                    if len(data) == most_bytes:
                        break
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
            raise ToolUnavailable(self._component, f"{url}: {type(error).__name__}: {error}") from error
        if answer.status_code == 200 and len(data) == most_bytes:
            raise ToolInfraError(self._component, f"{url}: the answer has {most_bytes} bytes or more: ask for less")
        return self._to_json(url, answer.status_code, data, answer.headers.get("Retry-After"))

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _pool(self) -> httpx.AsyncClient:
        if self._client is None:
            timeout = httpx.Timeout(None, connect=min(5.0, self._timeout_s))
            # The guard's `concurrency` is the limit; a second one here would be waited for within the call's time.
            limits = httpx.Limits(max_connections=None)
            # The system's authorities and SSL_CERT_FILE: httpx's own list knows no private ones.
            context = ssl.create_default_context()
            self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, verify=context)
        return self._client

    def _to_json(self, url: str, status: int, data: bytearray, retry_after: str | None) -> Any:
        beginning = data[:200].decode("utf-8", "replace")
        # A service that is busy, starting or behind a failing proxy; what is asked here has no effects.
        if status in (408, 425, 429, 500, 502, 503, 504):
            raise ToolUnavailable(self._component, f"{url}: HTTP {status}: {beginning}", _seconds(retry_after))
        if status != 200:
            raise ToolInfraError(self._component, f"{url}: HTTP {status}: {beginning}")
        try:
            return json.loads(data)
        except ValueError as error:
            raise ToolInfraError(self._component, f"{url}: the answer is not JSON: {beginning}") from error


def _seconds(retry_after: str | None) -> float | None:
    """``Retry-After`` in seconds; its other form, a date, is left to the policy's own waits."""
    try:
        return max(0.0, float(retry_after)) if retry_after else None
    except ValueError:
        return None
