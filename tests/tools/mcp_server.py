"""A tiny real MCP server; `python mcp_server.py` talks over stdio."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult
from pydantic import Field


def build() -> MCPServer:
    server = MCPServer("tiny")
    notes: list[str] = []

    @server.tool()
    def note(text: str) -> str:
        """Keeps a note."""
        notes.append(text)
        return "kept"

    @server.tool()
    def read_notes() -> str:
        """All notes."""
        return " ".join(notes)

    @server.tool()
    def add(a: int, b: int) -> str:
        """Add two
        whole numbers."""
        return str(a + b)

    @server.tool()
    def fail() -> str:
        """Always fails."""
        raise ToolError("on purpose")

    @server.tool()
    def variable(name: str) -> str:
        """A variable of the server's environment."""
        return os.environ.get(name, "(unset)")

    @server.tool()
    def process() -> str:
        """The server's process id."""
        return str(os.getpid())

    @server.tool()
    def die() -> str:
        """Ends the server at once."""
        os._exit(7)

    @server.tool()
    async def wait() -> str:
        """Takes a minute."""
        await asyncio.sleep(60)
        return "done"

    @server.tool()
    def answer(result: dict[str, Any]) -> CallToolResult:
        """Answers with this result of a call."""
        return CallToolResult.model_validate(result)

    return server


def build_odd() -> MCPServer:
    """One tool whose schema Python can check, and some with one that it cannot."""
    server = MCPServer("odd")

    @server.tool()
    def pair(
        at: Annotated[list[int], Field(json_schema_extra={"items": [{"type": "integer"}, {"type": "integer"}]})],
    ) -> str:
        """A tuple as draft 7 has it."""
        return str(at)

    @server.tool()
    def word(text: Annotated[str, Field(json_schema_extra={"pattern": "^\\p{L}+$"})]) -> str:
        """A pattern of JavaScript's."""
        return text

    @server.tool()
    def thing(text: Annotated[str, Field(json_schema_extra={"type": "any"})]) -> str:
        """A type that no dialect has."""
        return text

    return server


if __name__ == "__main__":
    (build_odd() if "odd" in sys.argv else build()).run()
