"""Which MCP servers a recipe names: a command to talk with over stdio, or the URL of a streamable HTTP server."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

INSTALL = "MCP tools need the SDK: `pip install 'penstock[mcp]'`"


class McpServer(BaseModel):
    """One server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str | None = Field(None, description="Program of a stdio server; one process per agent worker.")
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
        """What the SDK's `Client` connects to. Raises `ValueError` where the SDK or a named variable is missing."""
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
