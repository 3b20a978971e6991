"""Tools that agents call, and the parsers that find the calls in what a model wrote."""

from penstock.tools.base import BaseTool, ToolInfraError, ToolResult

__all__ = ["BaseTool", "ToolInfraError", "ToolResult"]
