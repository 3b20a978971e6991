"""One tool of an MCP server, as the loop sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from penstock.tools.base import BaseTool, ToolInfraError, ToolResult, ToolUnavailable
from penstock.tools.mcp.connection import McpConnection
from penstock.transfer_queue import Task


class McpTool(BaseTool):
    """The server's name, description and schema. What the server calls an error of the tool, the model reads."""

    def __init__(self, connection: McpConnection, listed: Any, prefix: str = "") -> None:
        """`listed`: the SDK's `Tool`, as the server lists it."""
        super().__init__()
        self._connection = connection
        self._remote_name = listed.name
        self.name = f"{prefix}{listed.name}"
        self.description = " ".join((listed.description or listed.title or listed.name).split())
        self.parameters = {"properties": {}, **listed.input_schema, "type": "object"}

    async def create(self, task: Task) -> None:
        """Connected here: starting a server is no part of a call's time. What fails here the call tries again."""
        with contextlib.suppress(ToolUnavailable):
            await self._connection.client()

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        """Bad arguments are the model's; whatever else the protocol reports is the server's failure."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS

        client = await self._connection.client()
        try:
            answer = await client.call_tool(self._remote_name, dict(arguments))
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                return ToolResult(f"Error: {error.message}", is_error=True)
            # the server may have done its work: no second attempt, but the next call finds a fresh connection
            if error.code == CONNECTION_CLOSED:
                await self._connection.drop(client)
            raise self._failure(f"{error.code} {error.message}") from error
        except (OSError, RuntimeError) as error:
            await self._connection.drop(client)
            raise self._failure(f"{type(error).__name__}: {error}") from error
        return ToolResult(_text(answer), is_error=bool(answer.is_error))

    async def close(self) -> None:
        await self._connection.close()

    def _failure(self, reason: str) -> ToolInfraError:
        return ToolInfraError("mcp", f"{self._connection.server.label}: {reason}")


def _text(answer: Any) -> str:
    """The text parts, one per line; parts of another kind are named, not shown."""
    return "\n".join(_part(part) for part in answer.content) or "(no output)"


def _part(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource" and getattr(part.resource, "text", None) is not None:
        return str(part.resource.text)
    return f"[{part.type} left out]"
