"""How models write tool calls, and how they are read back."""

from penstock.tools.parsers.base import ParsedTurn, ParserName, ToolCall, ToolCallParser, get_parser

__all__ = ["ParsedTurn", "ParserName", "ToolCall", "ToolCallParser", "get_parser"]
