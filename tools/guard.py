"""The guard around every call of a tool: cache, concurrency limit, retries, deadline.

call ──► cache (pure tools) ──► semaphore (`concurrency`) ──► attempt within `timeout_s` ──unavailable──► wait, again
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import Any

from penstock.common import Backoff, retry
from penstock.common.errors import defined_at, finite_number
from penstock.tools.base import BaseTool, CallGuard, ToolInfraError, ToolResult, ToolUnavailable
from penstock.tools.config import ToolConfig
from penstock.tools.threads import call_users


class ResultCache:
    """Shared by all episodes of a worker; errors are not kept, so a recovered service is asked again."""

    def __init__(self, max_entries: int, max_chars: int = 32 << 20) -> None:
        self._max_entries = max_entries
        self._max_chars = max_chars
        self._entries: OrderedDict[str, ToolResult] = OrderedDict()
        self._chars = 0

    def get(self, arguments: Mapping[str, Any]) -> ToolResult | None:
        key = _key(arguments)
        result = self._entries.get(key)
        if result is not None:
            self._entries.move_to_end(key)
        return result

    def put(self, arguments: Mapping[str, Any], result: ToolResult) -> None:
        if result.is_error:
            return
        key = _key(arguments)
        self._drop(key)
        self._entries[key] = result
        self._chars += len(key) + len(result.text)
        while self._entries and (len(self._entries) > self._max_entries or self._chars > self._max_chars):
            self._drop(next(iter(self._entries)))

    def _drop(self, key: str) -> None:
        result = self._entries.pop(key, None)
        if result is not None:
            self._chars -= len(key) + len(result.text)


def _key(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True, ensure_ascii=False)


BACKOFF = Backoff(0.5, 30.0, jitter=(0.5, 1.0))
"""Jitter spreads out the workers that were refused at the same moment."""


class ToolGuard:
    """One per tool and worker: all episodes share its cache and its concurrency limit."""

    def __init__(self, config: ToolConfig, queue_deadline_s: float = 300.0) -> None:
        """`queue_deadline_s`: of waiting for a turn, which is the service's slowness and no part of `timeout_s`."""
        self.config = config
        self.cache = ResultCache(config.cache_entries)
        self._turns = asyncio.Semaphore(config.concurrency) if config.concurrency else None
        self._retries = config.retries
        self._queue_deadline_s = queue_deadline_s

    async def call(self, tool: BaseTool, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        """One call. Past `timeout_s` the model reads so; it is not tried again, since it may have had effects.

        Raises `ToolInfraError`: the tool failed, stayed unavailable, or no turn came in time.
        """
        known = self.cache.get(arguments) if tool.pure else None
        if known is not None:
            return known
        async with contextlib.nullcontext() if self._turns is None else self._turn(tool.name, self._turns):
            # `ToolUnavailable` promises that nothing was done.
            try:
                result = await retry(
                    lambda: self._attempt(tool, state, arguments),
                    BACKOFF,
                    retries=self._retries,
                    on=ToolUnavailable,
                    at_least_s=lambda error: error.after_s,
                )
            except ToolUnavailable as error:
                attempts = self._retries + 1
                raise ToolUnavailable(error.component, f"{error.reason} ({attempts} attempts)") from error
        if tool.pure:
            self.cache.put(arguments, result)
        return result

    async def _attempt(self, tool: BaseTool, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        limit_s = self.config.timeout_s
        try:
            async with asyncio.timeout(limit_s) as deadline:
                return _checked(tool, await call_users(tool.execute, state, arguments))
        except TimeoutError as error:
            if not deadline.expired():
                raise ToolInfraError(f"tool {tool.name}", f"{type(error).__name__}: {error}") from error
            return ToolResult(f"Error: {tool.name} did not finish within {limit_s:g} s", is_error=True)

    @contextlib.asynccontextmanager
    async def _turn(self, name: str, turns: asyncio.Semaphore) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._queue_deadline_s):
                await turns.acquire()
        except TimeoutError as error:
            raise ToolInfraError(f"tool {name}", f"no turn within {self._queue_deadline_s:g} s") from error
        try:
            yield
        finally:
            turns.release()


def _checked(tool: BaseTool, result: Any) -> ToolResult:
    """Raises `ToolInfraError` where a tool of the user's returned something else than a result."""
    wrong = _wrong_field(result) if isinstance(result, ToolResult) else f"{result!r:.80}"
    if not wrong:
        return result
    where = defined_at(getattr(tool, "function", tool.execute))
    rule = "return ToolResult(text), with text a str, numbers finite"
    raise ToolInfraError(f"tool {tool.name}", f"execute returned {wrong}: {rule}{where}")


def _wrong_field(result: ToolResult) -> str:
    fields = {
        "text": isinstance(result.text, str),
        "images": all(isinstance(image, str) for image in result.images),
        "reward": result.reward is None or finite_number(result.reward) is not None,
        "metrics": all(finite_number(value) is not None for value in result.metrics.values()),
    }
    wrong = next((name for name, is_right in fields.items() if not is_right), "")
    return f"a ToolResult whose {wrong} is {getattr(result, wrong)!r:.80}" if wrong else ""


def guard_of(tool: BaseTool, config: ToolConfig) -> CallGuard:
    """The tool's guard, made at its first use."""
    if tool.guard is None:
        tool.guard = ToolGuard(config)
    return tool.guard
