"""The calculator recipe's tool as a service far away: the `python` tool's name and schema, and a log-normal wait.

It computes what the recipe's model writes, `print(round(EXPRESSION,4))`, in the worker itself. A box for each episode
would cost more CPU than all else in such a run (`penstock bench sandbox` measures boxes), and hide the waiting.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping
from typing import Any

from benchmarks.support.written_code import computed
from penstock.datasets import BadExpression
from penstock.tools import BaseTool, PythonTool, ToolResult

PATH = "benchmarks.support.far_python:FarPython"


class FarPython(BaseTool):
    name = PythonTool.name
    description = PythonTool.description
    parameters = PythonTool.parameters

    def __init__(self, sandbox: Any = None, *, median_s: float, sigma: float, longest_s: float) -> None:
        """`sigma`: of the logarithm of a wait; waits are cut at `longest_s`."""
        super().__init__(sandbox)
        self._median_s, self._sigma, self._longest_s = median_s, sigma, longest_s

    async def execute(self, state: None, arguments: Mapping[str, Any]) -> ToolResult:
        wait_s = min(self._longest_s, random.lognormvariate(math.log(self._median_s), self._sigma))
        await asyncio.sleep(wait_s)
        metrics = {"tool_wait_s": wait_s}
        try:
            return ToolResult(computed(arguments["code"]), metrics=metrics)
        except BadExpression as error:
            return ToolResult(f"Error: {error}", metrics=metrics, is_error=True)
