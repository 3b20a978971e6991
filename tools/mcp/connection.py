"""A connection to one MCP server, kept open for a worker.

    calls ──client()──► owner task: connects ─► says ready ─► waits for close() or the connection's end ─► disconnects

The SDK's connection must be left by the task that entered it: that task is the owner; calls come from any task.
"""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.tools.base import ToolUnavailable
from penstock.tools.mcp.servers import McpServer

CONNECT_DEADLINE_S = 30.0
CLOSE_DEADLINE_S = 5.0


class McpConnection:
    """Connects at the first call and again after a break."""

    def __init__(self, server: McpServer, connect_deadline_s: float = CONNECT_DEADLINE_S) -> None:
        self.server = server
        self._connect_deadline_s = connect_deadline_s
        self._owner: asyncio.Task[None] | None = None
        self._client: Any = None
        self._stop = asyncio.Event()
        self._opening = asyncio.Lock()

    async def client(self) -> Any:
        """The SDK's `Client`, connected. Raises `ToolUnavailable`: nothing was asked of the server yet."""
        async with self._opening:
            if self._owner is None or self._owner.done():
                await self._connect()
            return self._client

    async def drop(self, client: Any) -> None:
        """After a break that a call met: the next call connects anew. Another call's newer connection stays."""
        async with self._opening:
            if self._client is client:
                await self.close()

    async def close(self) -> None:
        """Ends the connection, and with it a stdio server's process; safe to call twice."""
        owner, self._owner = self._owner, None
        if owner is None:
            return
        self._stop.set()
        await asyncio.wait([owner], timeout=CLOSE_DEADLINE_S)
        owner.cancel()
        await asyncio.gather(owner, return_exceptions=True)

    async def _connect(self) -> None:
        self._stop = asyncio.Event()
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(ready, self._stop))
        try:
            async with asyncio.timeout(self._connect_deadline_s):
                self._client = await asyncio.shield(ready)
        except TimeoutError as error:
            await self.close()
            raise ToolUnavailable(
                "mcp", f"{self.server.label}: no connection within {self._connect_deadline_s:g} s"
            ) from error
        except Exception as error:
            await self.close()
            raise ToolUnavailable("mcp", f"{self.server.label}: {_reason(error)}") from error
        except asyncio.CancelledError:
            await self.close()
            raise

    async def _own(self, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        """A break of the connection ends this task; the next call makes another one."""
        from mcp import Client

        try:
            async with Client(self.server.target()) as client:
                if not ready.done():
                    ready.set_result(client)
                await stop.wait()
        except Exception as error:  # noqa: BLE001 - the caller that waits decides about it
            if not ready.done():
                ready.set_exception(error)
        finally:
            if not ready.done():
                ready.cancel()


def _reason(error: BaseException) -> str:
    """The first cause in words: the SDK's task groups wrap it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
