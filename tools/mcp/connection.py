"""MCP servers of a recipe, and the connection to one of them.

    calls ──client()──► owner task: connects ─► says ready ─► waits for close() or the connection's end ─► disconnects

The SDK's connection must be left by the task that entered it: that task is the owner; calls come from any task.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.tools.base import ToolInfraError, ToolUnavailable

INSTALL = "MCP tools need the SDK: `pip install 'penstock[mcp]'`"


class McpServer(BaseModel):
    """One server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str | None = Field(
        None, description="Program of a stdio server; one process per agent worker, with `per_episode` one per episode."
    )
    args: list[str] = Field(default_factory=list, description="Its arguments.")
    cwd: str | None = Field(None, description="Its working directory.")
    pass_env: list[str] = Field(
        default_factory=list, description="Variables of this environment that it gets, besides PATH, HOME and the like."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Further variables, in plain text: no secrets.")
    url: str | None = Field(None, description="Of a streamable HTTP server.")
    token_env: str | None = Field(None, description="Variable with the bearer token that the HTTP server wants.")

    @model_validator(mode="after")
    def _one_way(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either command (a stdio server) or url (an HTTP server)")
        return self

    @property
    def label(self) -> str:
        return self.url or " ".join([self.command or "", *self.args])

    def target(self) -> Any:
        """Return the target of the SDK's `Client`. Raises `ValueError` where the SDK or a named variable is missing."""
        try:
            from mcp import StdioServerParameters
            from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
        except ImportError as error:
            raise ValueError(INSTALL) from error
        if self.command is not None:
            passed = {name: _variable(name) for name in self.pass_env}
            return StdioServerParameters(
                command=self.command, args=self.args, env={**passed, **self.env} or None, cwd=self.cwd
            )
        headers = {"Authorization": f"Bearer {_variable(self.token_env)}"} if self.token_env else None
        return streamable_http_client(self.url or "", http_client=create_mcp_http_client(headers))


def read_servers(path: Path) -> list[McpServer]:
    """The servers of a file in the shape that MCP clients share: ``{"mcpServers": {NAME: {"command" | "url", …}}}``.

    Raises `ValueError` naming the file and the server.
    """
    try:
        named = json.loads(path.read_text())["mcpServers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no file of MCP servers ({type(error).__name__}: {error})") from error
    return [_server(f"{path}: server {name!r}", settings) for name, settings in named.items()]


def _server(where: str, settings: Mapping[str, Any]) -> McpServer:
    try:
        return McpServer.model_validate(settings)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(f"{where}: {'.'.join(map(str, problem['loc']))} {problem['msg']}".strip()) from error


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ValueError(f"{name} is not set: an MCP server needs it")
    return value


CONNECT_DEADLINE_S = 30.0
CLOSE_DEADLINE_S = 5.0


class McpConnection:
    """Connects at the first call and, if it `reconnects`, again after a break."""

    def __init__(
        self, server: McpServer, connect_deadline_s: float = CONNECT_DEADLINE_S, *, reconnects: bool = True
    ) -> None:
        """`reconnects`: False where the server keeps state that a new connection would not have."""
        self.server = server
        self._connect_deadline_s = connect_deadline_s
        self._reconnects = reconnects
        self._owner: asyncio.Task[None] | None = None
        self._client: Any = None
        self._stop = asyncio.Event()
        self._opening = asyncio.Lock()

    async def client(self) -> Any:
        """The SDK's `Client`, connected. Raises `ToolUnavailable`: nothing was asked of the server yet.

        Raises `ToolInfraError` after a break if it does not reconnect.
        """
        async with self._opening:
            if self._owner is None or self._owner.done():
                if self._client is not None and not self._reconnects:
                    raise ToolInfraError("mcp", f"{self.server.label}: its state ended with the connection")
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
        try:
            await asyncio.wait([owner], timeout=CLOSE_DEADLINE_S)
        finally:
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


class EpisodeConnection:
    """The connection of one episode, shared by its tools of one server; closed when the last of them released it."""

    def __init__(self, server: McpServer) -> None:
        self.connection = McpConnection(server, reconnects=False)
        self._users = 0

    def take(self) -> EpisodeConnection:
        self._users += 1
        return self

    async def let_go(self) -> None:
        self._users -= 1
        if self._users == 0:
            await self.connection.close()


def _reason(error: BaseException) -> str:
    """The first cause in words: the SDK's task groups wrap it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
