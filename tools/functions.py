"""A tool from one typed function; descriptions come from its docstring.

@function_tool
def add(a: int, b: int) -> int:
    '''Add two numbers.'''
    return a + b
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, overload

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from penstock.common import USERS_FAULTS, describe_error
from penstock.tools.base import BaseTool, ToolInfraError, ToolResult
from penstock.tools.threads import call_users
from penstock.tools.validation import check_schema

_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def describe(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """(what the function does, argument name → what it is); lines are joined by spaces."""
    text = inspect.getdoc(function) or ""
    summary = text.split("\n\n", 1)[0]
    if re.match(r"Args:\s*$", summary.partition("\n")[0]):
        summary = ""
    return " ".join(summary.split()), _arguments(text.splitlines())


def _arguments(lines: list[str]) -> dict[str, str]:
    """Entries are indented once; deeper lines continue the entry above; an unindented line ends the section."""
    descriptions: dict[str, str] = {}
    start = next((i for i, line in enumerate(lines) if line.strip() in ("Args:", "Arguments:")), len(lines))
    name, indent = "", 0
    for line in lines[start + 1 :]:
        depth = len(line) - len(line.lstrip())
        if line.strip() and depth == 0:
            break
        match = _ARGUMENT.match(line.strip())
        indent = indent or depth
        if match and depth == indent:
            name = match[1]
            descriptions[name] = match[2]
        elif name:
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return descriptions


THE_CALLS_FAULT = (ValueError, TypeError, LookupError, ArithmeticError)
"""Exceptions that a function raises for arguments it cannot use: the model reads them and may try again."""


class FunctionTool(BaseTool):
    """Made by `function_tool`. Stateless: one object serves all episodes."""

    needs_sandbox = False

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        description: str | None = None,
        pure: bool = False,
    ) -> None:
        """Raises `ValueError` or `TypeError` where a parameter has no type that JSON knows."""
        super().__init__()
        self.function = function
        self.name = name or function.__name__
        self.pure = pure
        summary, arguments = describe(function)
        self.description = description or summary
        self._adapters = {one: _adapter(function, one, hint) for one, hint in _hints(function).items()}
        self.parameters = _schema(function, self._adapters, arguments)
        check_schema(self.name, self.parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, for its own tests."""
        return self.function(*args, **kwargs)

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        """Call the function. Its exceptions of `THE_CALLS_FAULT` go to the model; any other is the tool's failure."""
        try:
            values = {name: self._adapters[name].validate_python(value) for name, value in arguments.items()}
            return _to_result(await call_users(self.function, **values))
        except ToolInfraError:
            raise
        except ValidationError as error:
            return ToolResult(f"Error: {error.errors()[0]['msg']}", is_error=True)
        except THE_CALLS_FAULT as error:
            return ToolResult(f"Error: {type(error).__name__}: {error}", is_error=True)
        except USERS_FAULTS as error:
            raise ToolInfraError(self.name, describe_error(error)) from error


@overload
def function_tool(function: Callable[..., Any]) -> FunctionTool: ...


@overload
def function_tool(
    *, name: str | None = None, description: str | None = None, pure: bool = False
) -> Callable[..., FunctionTool]: ...


def function_tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    pure: bool = False,
) -> FunctionTool | Callable[..., FunctionTool]:
    """Schema from the type hints, descriptions from the docstring (its first paragraph, and an ``Args:`` section).

    `pure`: the result follows from the arguments alone; a worker calls it once per arguments.
    """
    if function is not None:
        return FunctionTool(function)
    return lambda decorated: FunctionTool(decorated, name, description, pure)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{function.__name__}: parameter {parameter.name!r} must be an ordinary named one")
        if parameter.name in {"self", "cls"} - set(hints):
            problem = "@function_tool takes functions, not methods; subclass BaseTool for a tool with state"
            raise TypeError(f"{function.__name__}: {problem}")
        if parameter.name not in hints:
            raise TypeError(f"{function.__name__}: parameter {parameter.name!r} needs a type hint")
    hints.pop("return", None)
    return hints


def _adapter(function: Callable[..., Any], parameter: str, hint: Any) -> TypeAdapter[Any]:
    try:
        adapter = TypeAdapter[Any](hint)
        adapter.json_schema()
    except PydanticUserError as error:
        reason = error.message.partition("\n")[0]
        raise TypeError(
            f"{function.__name__}: parameter {parameter!r} has no type that JSON knows: {reason}"
        ) from error
    return adapter


def _schema(
    function: Callable[..., Any], adapters: dict[str, TypeAdapter[Any]], descriptions: dict[str, str]
) -> dict[str, Any]:
    """Parameters as a schema; definitions stand at its root, where references look for them. Raises `TypeError`."""
    properties, definitions = dict[str, Any](), dict[str, Any]()
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        properties[name] = _without_titles(adapters[name].json_schema())
        for key, definition in properties[name].pop("$defs", {}).items():
            if definitions.setdefault(key, definition) != definition:
                raise TypeError(f"{function.__name__}: two different types are called {key}; rename one of them")
        if descriptions.get(name):
            properties[name]["description"] = descriptions[name]
        if parameter.default is parameter.empty:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required}
    return {**schema, "$defs": definitions} if definitions else schema


def _without_titles(schema: Any) -> Any:
    """Pydantic's titles repeat the names: tokens for nothing."""
    if isinstance(schema, dict):
        return {k: _without_titles(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str))}
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema


def _to_result(value: Any) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    plain = to_jsonable_python(value, bytes_mode="base64", inf_nan_mode="constants", fallback=str)
    return ToolResult(json.dumps(plain, ensure_ascii=False))
