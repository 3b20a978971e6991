"""What stands around every call of a tool: cache, turnstile, retries, deadline.

call ──► cache (pure tools) ──► turnstile (`concurrency`) ──► attempt within `timeout_s` ──unavailable──► wait, again
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from penstock.tools.base import BaseTool, ToolInfraError, ToolResult
from penstock.tools.cache import ResultCache
from penstock.tools.config import ToolConfig
from penstock.tools.retries import RetryPolicy, retry
from penstock.tools.threads import call_users

QUEUE_DEADLINE_S = 300.0
"""Waiting for a turn is the service's slowness, not the call's: it is no part of `timeout_s`, but it ends."""


class ToolGuard:
    """One per tool and worker: all episodes share its cache and its turnstile."""

    def __init__(self, config: ToolConfig, queue_deadline_s: float = QUEUE_DEADLINE_S) -> None:
        self.config = config
        self.cache = ResultCache(config.cache_entries)
        self._turns = asyncio.Semaphore(config.concurrency) if config.concurrency else None
        self._policy = RetryPolicy(config.retries)
        self._queue_deadline_s = queue_deadline_s

    async def call(self, tool: BaseTool, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        """One call. Past `timeout_s` the model reads so; it is not tried again, since it may have had effects.

        Raises `ToolInfraError`: the tool failed, stayed unavailable, or nobody got a turn in time.
        """
        known = self.cache.get(arguments) if tool.pure else None
        if known is not None:
            return known
        async with self._turn(tool.name):
            result = await retry(lambda: self._attempt(tool, state, arguments), self._policy)
        if tool.pure:
            self.cache.put(arguments, result)
        return result

    async def _attempt(self, tool: BaseTool, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        limit_s = self.config.timeout_s
        try:
            async with asyncio.timeout(limit_s) as deadline:
                result: ToolResult = await call_users(tool.execute, state, arguments)
                return result
        except TimeoutError as error:
            if not deadline.expired():
                raise ToolInfraError(f"tool {tool.name}", f"{type(error).__name__}: {error}") from error
            return ToolResult(f"Error: {tool.name} did not finish within {limit_s:g} s", is_error=True)

    @contextlib.asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        if self._turns is None:
            yield
            return
        try:
            async with asyncio.timeout(self._queue_deadline_s):
                await self._turns.acquire()
        except TimeoutError as error:
            raise ToolInfraError(f"tool {name}", f"no turn within {self._queue_deadline_s:g} s") from error
        try:
            yield
        finally:
            self._turns.release()


def guard_of(tool: BaseTool, config: ToolConfig) -> ToolGuard:
    """The tool's guard, made at its first use."""
    if tool.guard is None:
        tool.guard = ToolGuard(config)
    return tool.guard
