"""The `final_answer` tool: the agent says that it is done, and with what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.tools.base import BaseTool, ToolResult


class FinalAnswerTool(BaseTool):
    """A tool whose result is `final`: the loop ends there; reward functions read ``extra_info["final_answer"]``."""

    needs_sandbox = False
    name = "final_answer"
    description = "Give the final answer; nothing comes after it."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"answer": {"type": "string"}},
        "required": ["answer"],
    }

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(arguments["answer"], final=True)
