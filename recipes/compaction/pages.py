"""A notebook that is read page by page, and the reward of what is remembered of it.

The row's `extra_info["digits"]` has one digit per page. Pages are read once and in order: what the model no longer has
in its context it knows only from its own summaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools import BaseTool, ToolResult
from penstock.transfer_queue import Task


class NextPage(BaseTool):
    """The digit on the next page; the state is the number of pages read, so a repeated episode reads the same."""

    name = "next"
    description = "Next page"
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}

    async def create(self, task: Task) -> list[str]:
        return list(str(task.extra_info["digits"]))[::-1]

    async def execute(self, state: list[str], arguments: Mapping[str, Any]) -> ToolResult:
        if not state:
            return ToolResult("none")
        digit = state.pop()
        return ToolResult(f"{digit} more" if state else f"{digit} end")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Share of the pages whose digit the last turn has at its place; 0 if it has another number of digits."""
    answer = [sign for sign in str((extra_info or {}).get("final_text", solution_str)) if sign.isdigit()]
    return agreement(answer, ground_truth)


def agreement(answer: Sequence[str], digits: Sequence[str]) -> float:
    if len(answer) != len(digits):
        return 0.0
    return sum(one == other for one, other in zip(answer, digits, strict=True)) / len(digits)
