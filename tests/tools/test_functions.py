from __future__ import annotations

import asyncio
import threading
from typing import Literal

import pytest

from penstock.tools import ToolInfraError, ToolResult, function_tool
from penstock.tools.functions import FunctionTool


@function_tool
def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> str:
    """Look up
    the weather.

    More that the model does not need.

    Args:
        city: Name of the city,
            in English.
        days (int): How many days.

    Returns:
        A sentence.
    """
    return f"{city} {days} {unit}"


def test_function_tool_schema_from_hints_and_docstring() -> None:
    assert weather.schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look up the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the city, in English."},
                    "days": {"type": "integer", "description": "How many days."},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "tags": {"anyOf": [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}]},
                },
                "required": ["city"],
            },
        },
    }
    assert weather("Oslo") == "Oslo 1 C"


async def test_function_tool_runs_sync_functions_in_a_thread() -> None:
    @function_tool
    def where() -> bool:
        return threading.current_thread() is threading.main_thread()

    @function_tool(name="where", description="Where am I")
    async def where_async() -> dict[str, bool]:
        await asyncio.sleep(0)
        return {"main": threading.current_thread() is threading.main_thread()}

    assert (await where.execute(None, {})).text == "false"
    assert (await where_async.execute(None, {})).text == '{"main": true}'
    assert (where_async.name, where_async.description) == ("where", "Where am I")
    assert (await weather.execute(None, {"city": "Rom", "days": 2})).text == "Rom 2 C"


async def test_function_tool_whose_fault_an_exception_is() -> None:
    def fail(error: str) -> ToolResult:
        raise {"value": ValueError("bad date"), "os": ConnectionError("refused")}[error]

    tool = FunctionTool(fail)
    result = await tool.execute(None, {"error": "value"})
    assert (result.text, result.is_error) == ("Error: ValueError: bad date", True)
    with pytest.raises(ToolInfraError, match="fail: ConnectionError: refused"):
        await tool.execute(None, {"error": "os"})


def test_function_tool_functions_that_cannot_be_tools_say_why() -> None:
    with pytest.raises(TypeError, match="parameter 'x' needs a type hint"):
        function_tool(lambda x: x)

    def many(*args: int) -> int:
        return sum(args)

    with pytest.raises(TypeError, match="parameter 'args' must be an ordinary named one"):
        function_tool(many)
