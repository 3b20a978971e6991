"""Tools of MCP servers: all of those that an `mcp` entry of a recipe names, or those that it selects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.sandbox import Sandbox
from penstock.tools.base import BaseTool, ToolGroup, ToolInfraError, ToolResult, ToolUnavailable
from penstock.tools.episode_state import shared_in_episode
from penstock.tools.mcp.connection import (
    CLOSE_DEADLINE_S,
    CONNECT_DEADLINE_S,
    EpisodeConnection,
    McpConnection,
    McpServer,
    read_servers,
)
from penstock.tools.validation import check_schema
from penstock.transfer_queue import Task

log = logging.getLogger(__name__)


class McpTool(BaseTool):
    """The server's name, description and schema. What the server calls an error of the tool, the model reads."""

    def __init__(self, connection: McpConnection, listed: Any, prefix: str = "", *, per_episode: bool = False) -> None:
        """`listed`: the SDK's `Tool`, as the server lists it. `connection` serves all episodes unless `per_episode`."""
        super().__init__()
        self._shared = connection
        self._remote_name = listed.name
        self.name = f"{prefix}{listed.name}"
        self.description = " ".join((listed.description or listed.title or listed.name).split())
        self.parameters = {"properties": {}, **listed.input_schema, "type": "object"}
        self.listed = listed
        self.server = connection.server
        self._per_episode = per_episode
        if per_episode:
            # Another process or session of the server knows nothing of the earlier calls, and they may have had
            # effects elsewhere: if it is lost, the episode starts afresh.
            self.replayable = False
            self.turn_group = f"mcp {self.server.model_dump_json()}"

    async def create(self, task: Task) -> EpisodeConnection | None:
        """Connected here: starting a server is not part of a call's time. Where a shared one fails here, the call tries
        again; where the episode's own fails, the infrastructure does. Raises `ToolUnavailable`."""
        state = None
        if self._per_episode:
            state = shared_in_episode(self.turn_group, EpisodeConnection(self.server)).take()
        try:
            with contextlib.suppress(*(() if self._per_episode else (ToolUnavailable,))):
                await self._connection_of(state).client()
        except BaseException:
            await self.release(state)
            raise
        return state

    def _connection_of(self, state: EpisodeConnection | None) -> McpConnection:
        return self._shared if state is None else state.connection

    async def execute(self, state: EpisodeConnection | None, arguments: Mapping[str, Any]) -> ToolResult:
        """Bad arguments are the model's; whatever else the protocol reports is the server's failure."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS

        connection = self._connection_of(state)
        client = await connection.client()
        try:
            answer = await client.call_tool(self._remote_name, dict(arguments))
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                return ToolResult(f"Error: {error.message}", is_error=True)
            # the server may have done its work: no second attempt, but the next call finds a fresh connection
            if error.code == CONNECTION_CLOSED:
                await connection.drop(client)
            raise self._failure(f"{error.code} {error.message}") from error
        except (OSError, RuntimeError) as error:
            await connection.drop(client)
            raise self._failure(f"{type(error).__name__}: {error}") from error
        return ToolResult(_text(answer), is_error=bool(answer.is_error))

    async def release(self, state: EpisodeConnection | None) -> None:
        if state is not None:
            await state.let_go()

    async def close(self) -> None:
        await self._shared.close()

    def _failure(self, reason: str) -> ToolInfraError:
        return ToolInfraError("mcp", f"{self.server.label}: {reason}")


def _text(answer: Any) -> str:
    """The parts, one per line, and the result's JSON if no part has text. Images and other bytes are only named."""
    texts = [_text_of(part) for part in answer.content]
    lines = [_name_of(part) if text is None else text for part, text in zip(answer.content, texts, strict=True)]
    structured = answer.structured_content
    # An SDK's server wraps the text of a tool: {"result": ""} says no more than an empty text.
    if structured and structured != {"result": ""} and not any(text and text.strip() for text in texts):
        lines.append(json.dumps(structured, ensure_ascii=False))
    return "\n".join(lines).strip("\n") or "(no output)"


def _text_of(part: Any) -> str | None:
    text = getattr(part.resource if part.type == "resource" else part, "text", None)
    return None if text is None else str(text)


def _name_of(part: Any) -> str:
    if part.type == "resource_link":
        description = f" ({part.description})" if part.description else ""
        return f"{part.title or part.name}{description}: {part.uri}"
    address = f" {part.resource.uri}" if part.type == "resource" else ""
    return f"[{part.type}{address} left out]"


LIST_DEADLINE_S = 30.0


class McpTools(ToolGroup):
    """Tools of MCP servers. They are listed once, when the worker starts: schemas must not change during a run."""

    needs_sandbox = False

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        servers_file: str | None = None,
        select: list[str] | None = None,
        prefix: str = "",
        per_episode: bool = False,
        **server: Any,
    ) -> None:
        """Raises `ValueError` on settings that name no server.

        Args:
            servers_file: JSON in the shape that MCP clients share (``mcpServers``), instead of one server's fields.
            select: names of the tools to take; default: all.
            prefix: put before each name, where two servers have tools of one name.
            per_episode: a connection (of a stdio server: a process) for each episode, for servers that keep state:
                files, a browser, a shopping cart. Else one per worker serves all episodes.
            server: the fields of `McpServer`.
        """
        self._servers = read_servers(Path(servers_file)) if servers_file else [McpServer.model_validate(server)]
        if servers_file and server:
            raise ValueError(f"servers_file names the servers: {', '.join(server)} cannot be given too")
        self._select = select
        self._prefix = prefix
        self._per_episode = per_episode

    def tools(self) -> list[BaseTool]:
        """Raises `ValueError` where a server cannot be reached or has not what is selected."""
        usable: list[BaseTool] = []
        offered: list[str] = []
        for server in self._servers:
            connection = McpConnection(server)
            listed = _list_tools(server)
            offered += [tool.name for tool in listed]
            selected = (tool for tool in listed if self._select is None or tool.name in self._select)
            server_tools = [McpTool(connection, tool, self._prefix, per_episode=self._per_episode) for tool in selected]
            usable += [tool for tool in server_tools if self._can_be_called(tool)]
        missing = [name for name in self._select or () if name not in offered]
        if missing or not usable:
            which = ", ".join(missing) or f"of {', '.join(server.label for server in self._servers)} can be called"
            raise ValueError(f"MCP: no tool {which}; there are: {', '.join(offered) or 'none'}")
        return usable

    def _can_be_called(self, tool: McpTool) -> bool:
        """Raises `ValueError` where a tool that cannot was selected by name."""
        results, execution = tool.listed.output_schema, tool.listed.execution
        try:
            check_schema(tool.name, tool.parameters)
            if results is not None:  # the SDK checks each result, in this dialect if the schema names none
                dialect = "https://json-schema.org/draft/2020-12/schema"
                check_schema(tool.name, {"$schema": dialect, **results, "type": "object"}, "outputSchema is")
            if execution is not None and execution.task_support == "required":
                raise ValueError(f"tool {tool.name}: it runs only as a task of MCP, which is not supported")
        except ValueError as error:
            if self._select is not None:
                raise
            log.warning("MCP: a tool of %s is left out: %s", tool.server.label, error)
            return False
        return True


def _list_tools(server: McpServer) -> list[Any]:
    """Over its own connection, on a thread: tools are made in plain code, while a loop may be running."""
    server.target()  # its complaints are settings' mistakes, not the connection's
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(lambda: asyncio.run(_ask(server)))
        try:
            return future.result(CONNECT_DEADLINE_S + LIST_DEADLINE_S + 2 * CLOSE_DEADLINE_S)
        except ToolUnavailable as error:
            raise ValueError(f"MCP: {error.reason}") from error


async def _ask(server: McpServer) -> list[Any]:
    from mcp import MCPError

    connection = McpConnection(server)
    try:
        client = await connection.client()
        async with asyncio.timeout(LIST_DEADLINE_S):
            tools: list[Any] = []
            cursor = None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                if not (cursor := page.next_cursor):
                    return tools
    except TimeoutError as error:
        raise ToolUnavailable("mcp", f"{server.label}: no list of tools within {LIST_DEADLINE_S:g} s") from error
    except MCPError as error:
        raise ToolUnavailable("mcp", f"{server.label}: no list of tools: {error.message}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        raise ToolUnavailable("mcp", f"{server.label}: no list of tools: {field} {problem['msg']}") from error
    finally:
        await connection.close()
