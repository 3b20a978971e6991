"""The `python` tool for a sum in parts: its answer to a call adds the part that follows the printed result.

    user       What is 48+17, then?
    assistant  <tool_call>{"name": "python", "arguments": {"code": "print(round(48+17,4))"}}</tool_call>
    tool       65
               then *3
    assistant  <tool_call>{"name": "python", "arguments": {"code": "print(round(65*3,4))"}}</tool_call>
    tool       195
               then -20
    assistant  <tool_call>{"name": "python", "arguments": {"code": "print(round(195-20,4))"}}</tool_call>
    tool       175
    assistant  175

One call cannot solve such a sum. A problem that stands in the prompt as a whole is one program, however many steps it
has; here the later parts stand neither in the prompt nor in the interpreter. The agent worker holds them, and adds at
most one to its answer to a call, where the last line that the call printed is the result of the part before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.sandbox import Sandbox
from penstock.tools import EpisodeBox, PythonTool, ToolInfraError, ToolResult
from penstock.transfer_queue import Task


class WorksheetBox(EpisodeBox):
    """The box of a sum: `follows` has result → next part."""

    def __init__(self, sandbox: Sandbox, task: Task) -> None:
        """Raises `ToolInfraError` for a row that is not a sum in parts."""
        super().__init__(sandbox, task.task_id)
        self.follows = follow_ups(task)


class Worksheet(PythonTool):
    """Runs code as `python` does. Its answer depends on the row and the call alone.

    Nothing is counted, so another worker that takes the episode over, and a repeated call, get the same answer.
    """

    box_kind = WorksheetBox

    def _box_of(self, task: Task) -> WorksheetBox:
        return WorksheetBox(self._sandbox, task)

    async def execute(self, state: EpisodeBox, arguments: Mapping[str, Any]) -> ToolResult:
        assert isinstance(state, WorksheetBox)
        result = await super().execute(state, arguments)
        following = None if result.is_error else state.follows.get(last_line(result.text))
        return result if following is None else replace(result, text=f"{result.text}\nthen {following}")


def follow_ups(task: Task) -> dict[str, str]:
    """Return the follow-up questions from `extra_info` of the row: `parts` ("48+17 *3 -20") and `results` ("65 195
    175"), one for each part.

    Raises `ToolInfraError` which names the row.
    """
    parts, results = (str(task.extra_info.get(name) or "").split() for name in ("parts", "results"))
    if not parts or len(parts) != len(set(results)):
        requirement = (
            "extra_info needs `parts`, and `results` with a different one for each (data.py steps makes such rows)"
        )
        raise ToolInfraError("tool python", f"row {task.task_id}: {requirement}")
    return dict(zip(results[:-1], parts[1:], strict=True))


def last_line(text: str) -> str:
    return text.rpartition("\n")[2].strip()
