"""Asking a service for scores: what stands around every call of a tool (cache, turns, retries, deadline), and a rate.

ask ──► guard: cache ─► turn (`concurrency`) ─► attempt ─► rate (`per_minute`) ─► POST ──busy──► wait, again
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from penstock.agent_loops.errors import InfraFailure
from penstock.agent_loops.tracing import use
from penstock.common import bearer_headers
from penstock.tools import BaseTool, JsonClient, ToolConfig, ToolGuard, ToolResult


class Pace:
    """Lets one caller through every 60 / `per_minute` seconds, in the order in which they came; 0: no limit."""

    def __init__(self, per_minute: float) -> None:
        self._gap_s = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        now = time.monotonic()
        mine = max(now, self._next)
        self._next = mine + self._gap_s
        await asyncio.sleep(mine - now)


class ScoreService(BaseTool):
    """One URL that takes JSON and answers JSON, asked through a `ToolGuard`; the same question is asked once."""

    description = "scores answers"
    parameters: Mapping[str, Any] = {"type": "object"}
    pure = True

    def __init__(
        self,
        name: str,
        url: str,
        key_variable: str,
        read: Callable[[Any], str],
        *,
        timeout_s: float = 30.0,
        concurrency: int = 32,
        per_minute: float = 0.0,
        retries: int = 4,
        cache_entries: int = 4096,
    ) -> None:
        """`read` takes the answer's JSON apart. Raises `ValueError` where the key is not in the environment.

        Args:
            key_variable: environment variable that holds the bearer token; empty: none is sent.
            timeout_s: of one attempt.
            concurrency: requests at once from this worker.
            per_minute: requests per minute from this worker; 0: any number.
            retries: further attempts where the service was busy (its ``Retry-After`` is kept) or not reached.
            cache_entries: answers that are remembered.
        """
        super().__init__()
        self.name = name
        if key_variable and not os.environ.get(key_variable):
            raise ValueError(f"{key_variable} is not set: it holds the key of {url}")
        self._url, self._key_variable, self._read = url, key_variable, read
        self._pace = Pace(per_minute)
        self._http = JsonClient(name, timeout_s)
        # Waiting for the rate is part of an attempt, so the guard's limit is the client's with room for it; the
        # reward's own deadline bounds all attempts.
        wait_s = 60.0 * concurrency / per_minute if per_minute else 0.0
        self._guard = ToolGuard(
            ToolConfig(
                name=name,
                timeout_s=timeout_s + wait_s + 1.0,
                concurrency=concurrency,
                retries=retries,
                cache_entries=cache_entries,
            )
        )

    async def ask(self, body: Mapping[str, Any]) -> str:
        """Returns the body of the answer. Raises `InfraFailure` or `ToolInfraError` if the service fails."""
        result = await self._guard.call(self, None, body)
        if result.is_error:
            raise InfraFailure(self.name, result.text)
        return result.text

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        await self._pace.turn()
        use("judged_calls", 1)
        headers = bearer_headers(os.environ.get(self._key_variable, ""))
        answer = await self._http.ask("POST", self._url, headers=headers, body=dict(arguments))
        try:
            return ToolResult(self._read(answer))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InfraFailure(
                self.name, f"{self._url}: not the answer of such a service: {json.dumps(answer)[:200]}"
            ) from error

    async def close(self) -> None:
        await self._http.close()
