"""HTTP client for tools: one pool per tool, a deadline, and failures classified by whether a retry can help."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from penstock.tools.base import ToolInfraError, ToolUnavailable

MAX_ANSWER_BYTES = 16 << 20


class JsonClient:
    """Owner of a connection pool, made at the first request; `close` gives it back."""

    def __init__(self, component: str, timeout_s: float = 30.0) -> None:
        self._component = component
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, connect=min(5.0, timeout_s))
        self._session: aiohttp.ClientSession | None = None

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
        """The answer's JSON, of which `most_bytes` are read.

        Raises:
            ToolUnavailable: not reached, no answer in time, or busy: asking again may help.
            ToolInfraError: refused (the status and the beginning of the answer are named), or no JSON.
        """
        try:
            async with self._pool().request(
                method, url, json=body, params=params, headers=headers, allow_redirects=False
            ) as answer:
                data = bytearray(await answer.content.read(most_bytes))
                while not answer.content.at_eof() and len(data) < most_bytes:
                    data += await answer.content.read(most_bytes - len(data))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ToolUnavailable(self._component, f"{url}: {type(error).__name__}: {error}") from error
        return self._to_json(url, answer.status, data, answer.headers.get("Retry-After"))

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _pool(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The guard's `concurrency` is the limit; a second one here would be waited for within the call's time.
            connector = aiohttp.TCPConnector(limit=0, loop=asyncio.get_running_loop())
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        return self._session

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
            raise ToolInfraError(self._component, f"{url}: the answer is no JSON: {beginning}") from error


def _seconds(retry_after: str | None) -> float | None:
    """``Retry-After`` in seconds; its other form, a date, is left to the policy's own waits."""
    try:
        return max(0.0, float(retry_after)) if retry_after else None
    except ValueError:
        return None
