from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from penstock.tools import ToolInfraError, ToolResult, check_arguments, function_tool
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


class Unit(Enum):
    GRAM = "g"
    LITRE = "l"


class Item(BaseModel):
    name: str
    unit: Unit | None = None
    parts: list[Item] = []


@function_tool
def order(
    units: list[Unit], unit: Unit | None, items: list[Item], item: Item, sizes: dict[str, tuple[Unit, int]]
) -> str:
    return repr((units, unit, items, item, sizes))


FLOUR = {"name": "flour", "unit": "g", "parts": [{"name": "wheat"}]}
ORDER = {"units": ["g", "l"], "unit": "l", "items": [FLOUR], "item": FLOUR, "sizes": {"small": ["g", 5]}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"unit": None}, None),
        ({"units": ["kg"]}, "argument 'units[0]': 'kg' is not one of ['g', 'l']"),
        ({"unit": "kg"}, "argument 'unit': 'kg' is not valid under any of the given schemas"),
        ({"items": [{"unit": "g"}]}, "argument 'items[0]': 'name' is a required property"),
        ({"item": {**FLOUR, "parts": [{}]}}, "argument 'item.parts[0]': 'name' is a required property"),
        ({"sizes": {"small": ["kg", 5]}}, "argument 'sizes.small[0]': 'kg' is not one of ['g', 'l']"),
    ],
)
async def test_function_tool_types_of_the_users_own(change: dict[str, Any], problem: str | None) -> None:
    arguments = ORDER | change
    assert check_arguments(order.parameters, arguments) == problem
    if problem is None:
        item = Item.model_validate(FLOUR)
        unit = None if arguments["unit"] is None else Unit.LITRE
        values = ([Unit.GRAM, Unit.LITRE], unit, [item], item, {"small": (Unit.GRAM, 5)})
        assert await order.execute(None, arguments) == ToolResult(repr(values))


@dataclass
class Stock:
    item: Item
    counted: date


FLOUR_JSON = '{"name": "flour", "unit": "g", "parts": [{"name": "wheat", "unit": null, "parts": []}]}'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Unit.GRAM, '"g"'),
        (Item.model_validate(FLOUR), FLOUR_JSON),
        (Stock(Item.model_validate(FLOUR), date(2026, 1, 2)), f'{{"item": {FLOUR_JSON}, "counted": "2026-01-02"}}'),
        ({Unit.GRAM: (1, {2})}, '{"g": [1, [2]]}'),
        ([Decimal("1.50"), math.inf, 2**70, "ü"], '["1.50", Infinity, 1180591620717411303424, "ü"]'),
        (object, f'"{object}"'),
    ],
    ids=["enum", "model", "dataclass", "keys", "values", "class"],
)
async def test_function_tool_results_are_json(value: Any, text: str) -> None:
    def give() -> Any:
        return value

    assert (await FunctionTool(give).execute(None, {})).text == text


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

    with pytest.raises(TypeError, match="takes functions, not methods; subclass BaseTool"):

        class Shelf:
            @function_tool
            def stock(self, shelf: int) -> int:
                return shelf

    def many(*args: int) -> int:
        return sum(args)

    with pytest.raises(TypeError, match="parameter 'args' must be an ordinary named one"):
        function_tool(many)

    def any_type(a: Any) -> None:
        pass

    for unknown in (threading.Thread, Callable[[int], int]):
        any_type.__annotations__ = {"a": unknown}
        with pytest.raises(TypeError, match="any_type: parameter 'a' has no type that JSON knows: "):
            function_tool(any_type)

    def two(a: Any, b: Any) -> None:
        pass

    two.__annotations__ = {"a": list[Unit], "b": list[Enum("Unit", {"METRE": "m"})]}
    with pytest.raises(TypeError, match="two: two different types are called Unit; rename one of them"):
        function_tool(two)
