"""Tools of MCP servers (Model Context Protocol), by the official SDK."""

from penstock.tools.mcp.group import McpTools

__all__ = ["McpTools"]
